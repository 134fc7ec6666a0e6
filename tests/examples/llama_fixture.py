#!/usr/bin/env python3
"""Writes tests/examples/llama/: small Llama, Mistral, Qwen2 and Qwen3 with random weights, made by transformers.

  FAMILY/config.json, model*.safetensors   as save_pretrained writes them; Llama in two files with an index
  FAMILY/adapter/                          as PEFT's save_pretrained writes it: LoRA on all linear layers of the blocks
  FAMILY/expected.safetensors              tokens, logits of the model, adapted_logits with the adapter
  curves.json                              losses of 50 steps by torch's AdamW: "full", and "lora" from the adapter on

Needs torch, transformers 5.17 (scripts/install_peers) and peft 0.21; nothing is downloaded.
"""
import json
import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama")
VOCAB, TIME, BATCH, STEPS = 48, 12, 4, 50
SIZES = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
CONFIGS = {
    # Scaled frequencies of all three kinds: kept, blended, divided.
    "llama": LlamaConfig(**SIZES, head_dim=8, rope_parameters={
        "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40}),
    "mistral": MistralConfig(**SIZES, sliding_window=5, rms_norm_eps=1e-5),
    # The second layer alone has a window.
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4,
                         max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}


def make(config):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def batch(step):
    """Tokens [BATCH, TIME + 1] of a step; the test computes the same."""
    row = torch.arange(BATCH).unsqueeze(1) + BATCH * step
    column = torch.arange(TIME + 1).unsqueeze(0)
    return (row * row * 7 + column * column * 5 + row * column * 3) % VOCAB


def train(model):
    # The adapter or the whole model, whatever requires a gradient.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        tokens = batch(step)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adapt(model):
    torch.manual_seed(11)
    config = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).eval()


def main():
    curves = {}
    for family, config in CONFIGS.items():
        folder = os.path.join(OUT, family)
        model = make(config)
        model.save_pretrained(folder, max_shard_size="16KB" if family == "llama" else "1GB")
        tokens = batch(0)[:2, :TIME]
        with torch.no_grad():
            expected = {"tokens": tokens.contiguous(), "logits": model(tokens).logits}
            adapted = adapt(model)
            adapted.save_pretrained(os.path.join(folder, "adapter"))
            expected["adapted_logits"] = adapted(tokens).logits
        save_file(expected, os.path.join(folder, "expected.safetensors"))
        # None of the families has dropout in training mode.
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        curves[family] = {"full": train(again.train())}
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        again = PeftModel.from_pretrained(again, os.path.join(folder, "adapter"), is_trainable=True)
        curves[family]["lora"] = train(again.train())
        for root, _, files in os.walk(folder):
            for file in files:
                if file in ("generation_config.json", "README.md"):
                    os.remove(os.path.join(root, file))
                else:
                    os.chmod(os.path.join(root, file), 0o644)
    with open(os.path.join(OUT, "curves.json"), "w") as out:
        out.write(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()

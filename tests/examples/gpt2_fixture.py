#!/usr/bin/env python3
"""Writes tests/examples/gpt2/: two small GPT-2 made by Hugging Face's transformers, with the logits they compute.

  gelu_new/  as GPT2LMHeadModel.save_pretrained writes it
  gelu/      as older checkpoints are: no "transformer." prefix, masks among the weights; exact GELU

Needs torch, transformers and safetensors.
"""
import os

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpt2")
POSITIONS = 12


def make(activation):
    torch.manual_seed(7)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=POSITIONS, vocab_size=40, bos_token_id=None,
                        eos_token_id=None, activation_function=activation)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.3)
    return model


def main():
    for activation in ("gelu_new", "gelu"):
        folder = os.path.join(OUT, activation)
        os.makedirs(folder, exist_ok=True)
        model = make(activation)
        tokens = torch.randint(0, 40, (2, POSITIONS))
        with torch.no_grad():
            logits = model(tokens).logits
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "generation_config.json"))
        if activation == "gelu":
            weights = {k: v.contiguous() for k, v in model.transformer.state_dict().items()}
            for layer in range(2):
                mask = torch.tril(torch.ones(POSITIONS, POSITIONS)).view(1, 1, POSITIONS, POSITIONS)
                weights[f"h.{layer}.attn.bias"] = mask
            save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        save_file({"tokens": tokens, "logits": logits}, os.path.join(folder, "expected.safetensors"))
        for file in os.listdir(folder):
            os.chmod(os.path.join(folder, file), 0o644)


if __name__ == "__main__":
    main()

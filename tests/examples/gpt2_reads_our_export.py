#!/usr/bin/env python3
"""Whether Hugging Face's transformers loads what `gpt --export_hf` writes, and computes the same with it.

  gpt2_reads_our_export.py BUILD_FOLDER      (of this project: BUILD_FOLDER/bin/gpt)

Two checks of each: the fixtures of tests/examples/gpt2 go through `gpt --load_hf F --steps 0 --export_hf G` and G gives
the logits of F; models trained for a few steps are exported, and the loss that the program reports for their next batch
is the one that transformers computes. Needs torch, transformers and safetensors. Exit code 0: all agree.
"""
import json
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(HERE, "..", "parity", "data", "kjv_1m.bin")
BATCH, TIME = 4, 32


def run(program, work, *flags):
    config = os.path.join(work, "config.json")
    with open(config, "w") as out:
        json.dump({"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}, out)
    command = [program, "--deepspeed_config", config, "--data", TEXT, "--order", "sequential", "--generate", "0"]
    done = subprocess.run(command + list(flags), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command + list(flags))}\n{done.stderr}")


def load(folder):
    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    for kind, names in report.items():
        assert not names, f"{folder}: {kind}: {names}"
    return model.eval()


def check_fixture(program, work, activation):
    fixture = os.path.join(HERE, "gpt2", activation)
    folder = os.path.join(work, "fixture_" + activation)
    run(program, work, "--load_hf", fixture, "--seq_len", "8", "--steps", "0", "--export_hf", folder)
    expected = load_file(os.path.join(fixture, "expected.safetensors"))
    with torch.no_grad():
        error = (load(folder)(expected["tokens"]).logits - expected["logits"]).abs().max().item()
    print(f"{activation}: largest difference of logits {error:.2e}")
    return error < 1e-5


def check_trained(program, work, *flags):
    folder = os.path.join(work, "trained" + "".join(flags))
    metrics = os.path.join(work, "metrics.jsonl")
    run(program, work, "--layers", "2", "--hidden", "32", "--heads", "4", "--seq_len", str(TIME), "--steps", "20",
        "--export_hf", folder, *flags)
    run(program, work, "--load_hf", folder, "--steps", "1", "--metrics", metrics)
    with open(metrics) as lines:
        ours = json.loads(lines.readline())["loss"]
    with open(TEXT, "rb") as text:
        tokens = torch.tensor([list(text.read(TIME + 1)) for _ in (text.seek(n * TIME) for n in range(BATCH))])
    with torch.no_grad():
        logits = load(folder)(tokens[:, :-1]).logits
        theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    print(f"trained {' '.join(flags) or '(untied, exact GELU)'}: loss {ours:.6f}, transformers {theirs:.6f}")
    return abs(ours - theirs) < 1e-5


def main():
    program = os.path.join(sys.argv[1], "bin", "gpt")
    with tempfile.TemporaryDirectory() as work:
        fine = [check_fixture(program, work, activation) for activation in ("gelu_new", "gelu")]
        fine += [check_trained(program, work, *flags)
                 for flags in ((), ("--tie_embeddings",), ("--tanh_gelu",), ("--tie_embeddings", "--tanh_gelu"))]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()

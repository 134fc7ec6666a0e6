"""Writes tests/examples/golden.json: what plain torch says of the tiny GPT that examples/gpt builds (tests/parity/gpt.py).

  python tests/examples/golden.py

Per parameter a checksum of the initial bits, sum over j of (j + 1) * bits_j modulo 2^64, and the norm of its gradient in the first
step; the losses of five steps of torch.optim.AdamW on batches of 16 sequences without clipping; a sampled continuation's scores.
"""
import json
import os
import sys

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "parity"))
from gpt import batch, build, cfg_of, tokens, weights  # noqa: E402

BATCH, STEPS = 16, 5


def checksum(a):
    bits = np.ascontiguousarray(a, dtype=np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        return int(np.sum(bits * np.arange(1, bits.size + 1, dtype=np.uint64), dtype=np.uint64))


def run(tied):
    torch.manual_seed(0)
    c = cfg_of("tiny", tied)
    model, text = build(c), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses, norms = [], {}
    for step in range(STEPS):
        x, y = batch(text, step, 0, 1, BATCH, c.T)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return {"checksums": [[name, str(checksum(a))] for name, a in weights(c).items()], "gradient_norms": norms, "losses": losses}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(os.path.join(HERE, "golden.json"), "w") as f:
        json.dump({"untied": run(False), "tied": run(True)}, f, indent=1)
        f.write("\n")

#!/usr/bin/env python3
"""Layouts of DeepSpeed's sparse attention, for sparsity_pattern_test.cc: writes sparsity_layouts.json beside itself.

  sparsity_reference.py SPARSITY_CONFIG_PY     # deepspeed/ops/sparse_attention/sparsity_config.py of 0.19.6

The classes are DeepSpeed's own. Two things are ours: what they take from `random` is the draw by keys that
dsengine/sparsity_pattern.h states, and of unidirectional layouts nothing above the diagonal is left (DeepSpeed keeps such
blocks in some patterns, and leaves them to a causal mask).
"""
import importlib.util
import json
import os
import random
import sys

import torch

MASK, GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15
SEED, HEADS = 1234, 4


def mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def key(head, row, column):
    result = mixed((SEED + GAMMA) & MASK)
    for number in (head, row, column):
        result = mixed((result + GAMMA * (number + 1)) & MASK)
    return result


class Draws:
    """In the place of random.sample: called once a row, head by head."""

    def __init__(self, blocks, unidirectional):
        self.blocks, self.unidirectional, self.calls = blocks, unidirectional, 0

    def sample(self, population, count):
        head, row = divmod(self.calls, self.blocks)
        self.calls += 1
        columns = range(row + 1) if self.unidirectional else population
        return sorted(columns, key=lambda column: key(head, row, column))[:min(count, len(columns))]


def cases():
    one = {"different_layout_per_head": True}
    uni = {"attention": "unidirectional"}
    yield "Dense", "dense", {}, (3,)
    for extra in ({}, uni, {"horizontal_global_attention": True}, {"num_global_blocks": 2}, uni | {"num_global_blocks": 2},
                  one | {"num_different_global_patterns": 4}, one | uni | {"num_different_global_patterns": 2},
                  {"num_local_blocks": 3}):
        yield "Fixed", "fixed", extra, (4, 8, 11)
    for extra in ({}, uni, {"local_window_blocks": [2, 1, 3]}, uni | {"local_window_blocks": [1, 4]},
                  {"global_block_indices": [0, 5, 40]}, uni | {"global_block_indices": [2, 6]},
                  {"global_block_indices": [1, 6], "global_block_end_indices": [3, 40], "horizontal_global_attention": True},
                  {"num_random_blocks": 2}, one | {"num_random_blocks": 1}, uni | {"num_random_blocks": 2}):
        yield "Variable", "variable", extra, (4, 9)
    for extra in ({"num_random_blocks": 1}, one | {"num_random_blocks": 2}, uni | {"num_random_blocks": 1},
                  one | uni | {"num_random_blocks": 3}, {"num_random_blocks": 0, "num_sliding_window_blocks": 4},
                  {"num_random_blocks": 1, "num_global_blocks": 2}):
        yield "BigBird", "bigbird", extra, (5, 9)
    for extra in ({}, uni, {"num_sliding_window_blocks": 5}, {"global_block_indices": [3], "global_block_end_indices": [6]},
                  uni | {"global_block_indices": [0, 4]}):
        yield "BSLongformer", "bslongformer", extra, (5, 9)
    for extra in ({"attention": "bidirectional"}, uni, uni | {"num_sliding_window_blocks": 5}):
        yield "LocalSlidingWindow", "sliding_window", extra, (5, 9)


def main():
    spec = importlib.util.spec_from_file_location("sparsity_config", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = []
    for name, mode, extra, sizes in cases():
        for blocks in sizes:
            pattern = getattr(module, f"{name}SparsityConfig")(num_heads=HEADS, block=16, **extra)
            unidirectional = extra.get("attention") == "unidirectional"
            random.sample = Draws(blocks, unidirectional).sample
            layout = pattern.make_layout(16 * blocks)
            layout = torch.tril(layout) if unidirectional else layout
            rows = ["".join(str(int(kept)) for kept in head.flatten()) for head in layout]
            section = {"mode": mode, "block": 16} | extra
            written.append({"section": section, "blocks": blocks, "layout": rows if len(set(rows)) > 1 else rows[:1]})
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sparsity_layouts.json")
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in written) + "\n]\n")


if __name__ == "__main__":
    main()

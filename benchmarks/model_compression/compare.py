#!/usr/bin/env python3
"""What configs/compression.json makes of the example's GPT: bytes and loss of the small model against the whole one.

    benchmarks/model_compression/compare.py [--steps 600] [--seeds 1 2 3]

Trains on one rank with one thread (validation_curve), with the section compression_training and without it, the same optimizer,
learning rate, weights and order of sequences, on the first nine tenths of a text; losses are those of the last tenth. Prints of the
seeds the mean, the least and the most.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from validation_curve import add_options, config_of, print_table, shown, train  # noqa: E402

CASE = "compression"
SECTION = "compression_training"


def compare(folder, options):
    plain, compressed, small, sizes = [], [], [], set()
    whole = {key: value for key, value in config_of(CASE).items() if key != SECTION}
    for seed in options.seeds:
        plain.append(train("the run without", whole, seed, folder, options)["curve"][-1]["loss"])
        found = train(CASE, config_of(CASE), seed, folder, options, "--small")
        compressed.append(found["curve"][-1]["loss"])
        small.append(found["small_loss"])
        sizes.add((found["whole_bytes"], found["small_bytes"]))
        print(f"seed {seed}: loss {plain[-1]:.4f} without, {compressed[-1]:.4f} with, {small[-1]:.4f} of the small model", flush=True)
    (whole_bytes, small_bytes), = sizes
    return [f"| without `{SECTION}` | {whole_bytes:,} | {shown(plain, 3)} |",
            f"| with it, in training | {whole_bytes:,} | {shown(compressed, 3)} |",
            f"| the small model | {small_bytes:,} | {shown(small, 3)} |"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, steps=600)  # with fewer, weights are not yet at their 4 bits
    options = parser.parse_args()
    print_table("| model | bytes of parameters | loss |", compare, options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How soon training is at a loss when steps leave something out: the sections of configs/ against the same run without them.

    benchmarks/data_efficiency/compare.py [--steps 300] [--seeds 1 2 3] [--beyond 1.5]

Trains the example's GPT on one rank with one thread (validation_curve), the same optimizer, learning rate, weights and order of
sequences, on the first nine tenths of a text; the loss is that of the last tenth, with nothing left out. Of each seed the run
without comes first. The loss to reach is the mean of the last fifth of its curve; when a curve is there is read off between two
validations. Prints what the others take of the run without, in seconds, steps and tokens, and their loss after as many steps: the
mean of the seeds, the least and the most. A run that is not there after --beyond times the steps counts as "not reached".
"""

import argparse
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from validation_curve import add_options, config_of, print_table, shown, train  # noqa: E402

CASES = ("progressive_layer_drop", "random_ltd", "curriculum")
PLAIN = "zero1"  # what the others are without their sections
MEASURES = ("seconds", "step", "tokens")


def reached(curve, loss):
    """Where the curve first is at the loss, in each measure; None: nowhere."""
    for before, after in zip(curve, curve[1:]):
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"]) if before["loss"] > loss else 0.0
            return {key: before[key] + share * (after[key] - before[key]) for key in MEASURES}
    return None


def row(case, found, losses, options):
    """A line of the table. `found`: of each seed the ratios, or None; `losses`: of each seed, after the same steps."""
    missed = sum(1 for ratios in found if ratios is None)
    if missed:
        return (f"| `{case}.json` | not reached by {missed} of {len(found)} in {options.beyond:g} times the steps | | | "
                f"{shown(losses)} |")
    columns = [shown([ratios[key] for ratios in found]) for key in MEASURES]
    return f"| `{case}.json` | {' | '.join(columns)} | {shown(losses)} |"


def compare(folder, options):
    found, losses = {case: [] for case in options.cases}, {case: [] for case in options.cases}
    at_most = str(round(options.steps * options.beyond))
    for seed in options.seeds:
        plain = train(PLAIN, config_of(PLAIN), seed, folder, options)["curve"]
        loss = statistics.mean(point["loss"] for point in plain[-max(len(plain) // 5, 1):])
        of_plain = reached(plain, loss)
        print(f"seed {seed}: loss {loss:.4f} without, after {of_plain['seconds']:.1f} s, {of_plain['step']:.0f} steps", flush=True)
        for case in options.cases:
            curve = train(case, config_of(case), seed, folder, options, "--until", str(loss), "--at_most", at_most)["curve"]
            of_case = reached(curve, loss)
            losses[case].append(curve[len(plain) - 1]["loss"] / plain[-1]["loss"])
            found[case].append(of_case and {key: of_case[key] / of_plain[key] for key in MEASURES})
            print(f"  {case}: " + (f"{of_case['seconds']:.1f} s, {of_case['step']:.0f} steps" if of_case else
                                   f"not reached, {curve[-1]['loss']:.4f} after {curve[-1]['step']} steps"), flush=True)
    return [row(case, found[case], losses[case], options) for case in options.cases]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, steps=300)
    parser.add_argument("--beyond", type=float, default=1.5, help="times the steps that the others have at most (1.5)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    if options.steps < 2 * options.every:
        parser.error(f"--steps: expected two validations or more, one each {options.every} steps (--every), found {options.steps}")
    print_table("| config | seconds | steps | tokens | loss after the same steps |", compare, options)


if __name__ == "__main__":
    main()

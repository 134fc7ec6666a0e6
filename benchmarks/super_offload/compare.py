#!/usr/bin/env python3
"""What super_offload does: the example's GPT with offload_optimizer, with and without super_offload.

    benchmarks/super_offload/compare.py [--steps 100] [--rounds 3] [--procs 2] [--clipping 1]

Both runs have the same data and start; their losses must be equal in every step, else it fails. Prints the last loss, how
many of the updates that began before the gradient was judged stood, and the ratio of the median step times, of rounds in
turn. On the CPU backward and update share the cores, so that the time of a step says nothing about a device.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VERDICT = re.compile(r"super_offload: (\d+) of (\d+) updates .* stood; (\d+) steps went without")


def train(super_offload, folder, options):
    """Returns (losses, seconds of the median step, (stood, begun, without) or None)."""
    with open(os.path.join(ROOT, "configs/zero2.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["gradient_clipping"] = options.clipping
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "super_offload": super_offload}
    config["zero_optimization"]["reduce_bucket_size"] = options.bucket
    paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("config", "metrics")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    command = [os.path.join(options.build, "bin/ds-launch"), "--num_procs", str(options.procs),
               os.path.join(options.build, "bin/gpt"), "--deepspeed_config", paths["config"], "--steps",
               str(options.steps), "--seed", "1", "--generate", "0", "--metrics", paths["metrics"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"super_offload: gpt ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics"], encoding="utf-8") as file:
        steps = [line for line in map(json.loads, file) if "loss" in line]
    found = VERDICT.search(done.stdout)
    verdict = tuple(int(number) for number in found.groups()) if found else None
    return [step["loss"] for step in steps], statistics.median(step["step_seconds"] for step in steps), verdict


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--clipping", type=float, default=0.0, help="gradient_clipping; 0: off")
    parser.add_argument("--bucket", type=int, default=100_000, help="reduce_bucket_size, elements")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    ratios = []
    for turn in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            plain, seconds_without, _ = train(False, folder, options)
            losses, seconds_with, verdict = train(True, folder, options)
        if losses != plain:
            sys.exit("super_offload: the losses differ from those without it, first in step "
                     f"{next(i for i, pair in enumerate(zip(losses, plain), 1) if pair[0] != pair[1])}")
        if verdict is None:
            sys.exit("super_offload: no update began before its gradient was judged")
        stood, begun, without = verdict
        ratios.append(seconds_with / seconds_without)
        print(f"round {turn}  last loss {losses[-1]:.6f}, equal in all {len(losses)} steps  {stood} of {begun} updates "
              f"stood, {without} steps without  {ratios[-1]:.3f} of the time of a step without", flush=True)
    print(f"median {statistics.median(ratios):.3f} of the time of a step without")


if __name__ == "__main__":
    main()

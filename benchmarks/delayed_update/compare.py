#!/usr/bin/env python3
"""What a delayed update does to the loss: the example's GPT with offload_optimizer, with and without delayed_update.

    benchmarks/delayed_update/compare.py [--steps 400] [--seeds 2] [--procs 2]

Every run of one seed has the same data and start. Prints the mean loss of the first and the last tenth of the steps, and
the time of a step, for: no delay, delayed from step 40 on (the default) and delayed from step 1 on. On the CPU the update
and the next forward share the cores, so that the time of a step says nothing about a device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CASES = {"no delay": {}, "from step 40": {"delayed_update": True}, "from step 1": {"delayed_update": True,
                                                                                  "delayed_update_start": 1}}


def train(keys, seed, folder, options):
    """Returns (losses, seconds of the median step)."""
    with open(os.path.join(ROOT, "configs/zero2.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **keys}
    paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("config", "metrics")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    command = [os.path.join(options.build, "bin/ds-launch"), "--num_procs", str(options.procs),
               os.path.join(options.build, "bin/gpt"), "--deepspeed_config", paths["config"], "--steps",
               str(options.steps), "--seed", str(seed), "--generate", "0", "--metrics", paths["metrics"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"delayed_update: gpt ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics"], encoding="utf-8") as file:
        steps = [line for line in map(json.loads, file) if "loss" in line]
    return [step["loss"] for step in steps], statistics.median(step["step_seconds"] for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    tenth = max(options.steps // 10, 1)
    for seed in range(1, options.seeds + 1):
        for name, keys in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                losses, seconds = train(keys, seed, folder, options)
            first, last = statistics.mean(losses[:tenth]), statistics.mean(losses[-tenth:])
            print(f"seed {seed}  {name:13}  loss of the first {tenth} steps {first:.4f}  of the last {tenth} "
                  f"{last:.4f}  {seconds:.3f} s a step", flush=True)


if __name__ == "__main__":
    main()

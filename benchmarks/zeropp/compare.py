#!/usr/bin/env python3
"""ZeRO++ against plain stage 3 on two nodes: bytes between the nodes, and the loss curve.

    benchmarks/zeropp/compare.py [--steps 200] [--rate 200mbit]

Trains the example's GPT twice with the same data on 2 nodes of 2 ranks each (scripts/slow_network: network namespaces,
bytes read from their interfaces): once with configs/zeropp.json, once with the same file without its three ZeRO++ keys.
Exit code 1 when fewer than 3.9 times fewer bytes cross between the nodes, or when the loss over the last tenth of the
steps differs by more than 1 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KEYS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
FEWER = 3.9
NEAR = 0.01


def train(config, folder, name, options):
    """Returns (losses, bytes sent between the nodes, seconds of the median step)."""
    paths = {kind: os.path.join(folder, f"{name}.{kind}.json") for kind in ("config", "metrics", "report")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    command = [os.path.join(ROOT, "scripts/slow_network"), "--nodes", "2", "--procs_per_node", "2",
               "--report", paths["report"]]
    if options.rate:
        command += ["--rate", options.rate]
    command += ["--", os.path.join(options.build, "bin/gpt"), "--deepspeed_config", paths["config"], "--steps",
                str(options.steps), "--generate", "0", "--metrics", paths["metrics"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"zeropp: {name} ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics"], encoding="utf-8") as file:
        steps = [line for line in map(json.loads, file) if "loss" in line]
    with open(paths["report"], encoding="utf-8") as file:
        sent = sum(node["sent_payload_bytes"] for node in json.load(file)["node"])
    return [step["loss"] for step in steps], sent, statistics.median(step["step_seconds"] for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", help="of each node's link, as scripts/slow_network takes it (default: unlimited)")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    with open(os.path.join(ROOT, "configs/zeropp.json"), encoding="utf-8") as file:
        config = json.load(file)
    plain = json.loads(json.dumps(config))
    for key in KEYS:
        del plain["zero_optimization"][key]
    with tempfile.TemporaryDirectory() as folder:
        exact, exact_bytes, exact_seconds = train(plain, folder, "stage3", options)
        found, found_bytes, found_seconds = train(config, folder, "zeropp", options)
    last = max(options.steps // 10, 1)
    exact_loss, found_loss = statistics.mean(exact[-last:]), statistics.mean(found[-last:])
    fewer = exact_bytes / found_bytes
    print(f"bytes between nodes  stage 3 {exact_bytes:,}  ZeRO++ {found_bytes:,}: {fewer:.2f} times fewer")
    print(f"loss, last {last} steps  stage 3 {exact_loss:.4f}  ZeRO++ {found_loss:.4f}: "
          f"{(found_loss / exact_loss - 1) * 100:+.2f} %")
    print(f"seconds of a step    stage 3 {exact_seconds:.3f}  ZeRO++ {found_seconds:.3f}: "
          f"{exact_seconds / found_seconds:.2f} times as fast")
    if fewer < FEWER or abs(found_loss / exact_loss - 1) > NEAR:
        sys.exit(f"zeropp: expected at least {FEWER} times fewer bytes and a loss within {NEAR:.0%}")


if __name__ == "__main__":
    main()

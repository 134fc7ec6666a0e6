#!/usr/bin/env python3
"""The 1-bit optimizers against dense AdamW over a slow network: bytes at the interfaces, and seconds of a step.

    benchmarks/compression/compare.py [--rate 100mbit] [--nodes 2] [--model small 20m] [--steps 1000]

Trains the example's GPT on nodes of one rank each (scripts/slow_network: network namespaces, bytes read from the
counters of their interfaces) with AdamW and gradients in float32, with 16-bit gradients, OneBitAdam and ZeroOneAdam:

  a step     bytes that all nodes send in a step: the difference of two runs of different length, both beyond the
             warm-up, divided by the steps between, so that start-up cancels. Seconds: the median, of the longer run.
  whole run  --steps steps of the small model with tiny batches, on links without a limit: warm-up and start-up
             included.

Exit code 1 when a step of OneBitAdam sends more than 1/31 of float32's bytes or 1/15.5 of 16-bit ones (20m, 2 nodes;
small: 1/29 and 1/14.5), or a whole run of OneBitAdam more than 1/5, of ZeroOneAdam more than 1/20. Seconds never decide.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from policies import policy as whole_run_policy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Flags of gpt, and steps between the two lengths of a run of a dense and of a compressed optimizer.
MODELS = {
    "small": {"flags": [], "dense_steps": 24, "compressed_steps": 48},
    "20m": {"flags": ["--layers", "6", "--hidden", "528", "--seq_len", "16"], "dense_steps": 4,
            "compressed_steps": 16},
}
TINY = ["--seq_len", "16"]
MEET = 16  # ZeroOneAdam's local_step_clipper
# Times fewer bytes than float32, and than 16 bits. Small steps are few bytes, which TCP's repetitions blur by 3 %.
FEWER = {"20m": (31.0, 15.5), "small": (29.0, 14.5)}
WHOLE_RUN = {"OneBitAdam": 5.0, "ZeroOneAdam": 20.0}
# Of the runs that measure a step. Both end their warm-up at once; ZeroOneAdam meets every MEET steps from step 16 on.
STEP_POLICY = {"OneBitAdam": {"freeze_step": 2},
               "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": MEET}}


# Optimizer, communication_data_type, ZeRO stage.
CASES = {
    "AdamW, float32": ("AdamW", None, 0),
    "AdamW, 16 bits": ("AdamW", "bf16", 0),
    "OneBitAdam": ("OneBitAdam", None, 0),
    "same, stage 2": ("OneBitAdam", None, 2),
    "ZeroOneAdam": ("ZeroOneAdam", None, 0),
}


def config_of(optimizer, wire, stage, policy, micro_batch):
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, "weight_decay": 0.01, **policy}},
        "zero_optimization": {"stage": stage},
    }
    if wire:
        config["communication_data_type"] = wire
    return config


def run(config, steps, flags, rate, folder, options):
    """Returns (bytes that all nodes sent, seconds of each step)."""
    paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("config", "metrics", "report")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    command = [os.path.join(ROOT, "scripts/slow_network"), "--nodes", str(options.nodes), "--report", paths["report"],
               "--ds_launch", os.path.join(options.build, "bin/ds-launch")]
    if rate:
        command += ["--rate", rate]
    command += ["--", os.path.join(options.build, "bin/gpt"), "--deepspeed_config", paths["config"], "--data",
                options.data, "--steps", str(steps), "--generate", "0", "--metrics", paths["metrics"], *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compression: {config['optimizer']['type']} ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics"], encoding="utf-8") as file:
        seconds = [line["step_seconds"] for line in map(json.loads, file) if "loss" in line]
    with open(paths["report"], encoding="utf-8") as file:
        sent = sum(node["sent_payload_bytes"] for node in json.load(file)["node"])
    return sent, seconds


def median_step(seconds, period):
    """Of a step, where one in `period` steps is unlike the others: the median of such groups, divided."""
    groups = [sum(seconds[i:i + period]) for i in range(0, len(seconds) - period + 1, period)]
    return statistics.median(groups) / period


def measure_step(name, model, folder, options):
    """Returns (bytes of a step, seconds of a step)."""
    optimizer, wire, stage = CASES[name]
    policy = STEP_POLICY.get(optimizer, {})
    period = policy.get("local_step_clipper", 1)
    first = 2 * MEET if period > 1 else 4
    more = MODELS[model]["compressed_steps" if policy and stage == 0 else "dense_steps"]
    config = config_of(optimizer, wire, stage, policy, options.micro_batch if model == "small" else 1)
    sent = []
    for steps in (first, first + more):
        total, seconds = run(config, steps, MODELS[model]["flags"], options.rate, folder, options)
        sent.append(total)
    return (sent[1] - sent[0]) / more, median_step(seconds[first:], period)


def compare_steps(model, folder, options):
    """Prints the table of a model. Returns what missed its target."""
    print(f"a step, {model}, {options.nodes} nodes, {options.rate or 'unlimited'}"
          f"\n  {'':16}{'bytes':>14}{'of float32':>12}{'of 16 bits':>12}{'seconds':>10}{'of float32':>12}", flush=True)
    found, missed = {}, []
    for name in options.cases:
        found[name] = sent, seconds = measure_step(name, model, folder, options)
        fp32, fp32_seconds = found["AdamW, float32"]
        half = found["AdamW, 16 bits"][0] if "AdamW, 16 bits" in found else None
        print(f"  {name:16}{sent:14,.0f}{fp32 / sent:11.2f}x" + (f"{half / sent:11.2f}x" if half else " " * 12) +
              f"{seconds:10.4f}{fp32_seconds / seconds:11.2f}x", flush=True)
        if name == "OneBitAdam" and options.nodes == 2:
            than_fp32, than_half = FEWER[model]
            if fp32 / sent < than_fp32 or (half and half / sent < than_half):
                missed.append(f"a step of OneBitAdam: expected {than_fp32} times fewer bytes than float32 and "
                              f"{than_half} than 16 bits")
    return missed


def compare_whole_runs(folder, options):
    print(f"whole run, small, {options.steps} steps, {options.nodes} nodes", flush=True)
    dense, missed = None, []
    for name in ("AdamW", *WHOLE_RUN):
        policy = whole_run_policy(name, options.steps)
        sent, _ = run(config_of(name, None, 0, policy, 1), options.steps, TINY, None, folder, options)
        dense = dense or sent
        keys = ", ".join(f"{key} {value}" for key, value in policy.items())
        print(f"  {name:16}{sent:14,}{dense / sent:11.2f}x  {keys}", flush=True)
        if dense / sent < WHOLE_RUN.get(name, 0):
            missed.append(f"a whole run of {name}: expected {WHOLE_RUN[name]} times fewer bytes")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of each node's link, as slow_network takes it (100mbit); empty: no limit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS), help="small, 20m (both)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE",
                        help="AdamW, float32 first; all by default: " + "; ".join(CASES))
    parser.add_argument("--steps", type=int, default=1000, help="of a whole run; 0: none (1000)")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank and step, small model (4)")
    parser.add_argument("--data", default=os.path.join(ROOT, "tests/parity/data/kjv_1m.bin"))
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    if "AdamW, float32" not in options.cases:
        parser.error("--cases: expected \"AdamW, float32\" among them, which the others are compared with")
    options.cases.sort(key=list(CASES).index)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.model:
            missed += compare_steps(model, folder, options)
        if options.steps:
            missed += compare_whole_runs(folder, options)
    if missed:
        sys.exit("compression: " + "; ".join(missed))


if __name__ == "__main__":
    main()

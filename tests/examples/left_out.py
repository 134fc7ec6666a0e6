#!/usr/bin/env python3
"""What a step leaves out is the same however the example GPT's layers are run: each config of configs/ by itself, in a pipeline
of two stages, with recomputation, over a tensor axis. Losses agree; with a loss scale that overflows, decisions go on.

  left_out.py BUILD SCRATCH SOURCE
"""
import json
import os
import subprocess
import sys

STEPS = 8
BUILD, SCRATCH, SOURCE = sys.argv[1:4]


def check(ok, what, *found):
    if not ok:
        sys.exit(f"expected: {what}; found: {' '.join(map(str, found))}")


def config_of(name):
    with open(os.path.join(SOURCE, "configs", f"{name}.json")) as f:
        config = json.load(f)
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "log_level": "warning"}
    if "curriculum_learning" in config:
        config["curriculum_learning"]["schedule_config"] = {"total_curriculum_step": 6, "difficulty_step": 8}
    if "progressive_layer_drop" in config:  # so low that a stage often leaves out all that it has
        config["progressive_layer_drop"] = {"enabled": True, "theta": 0.1, "gamma": 1.0}
    return config


def losses(config, ranks, *flags):
    path, metrics = os.path.join(SCRATCH, "config.json"), os.path.join(SCRATCH, "metrics.jsonl")
    with open(path, "w") as f:
        json.dump(config, f)
    command = [os.path.join(BUILD, "bin", "ds-launch"), "--num_procs", str(ranks), os.path.join(BUILD, "bin", "gpt"),
               "--deepspeed_config", path, "--data", os.path.join(SOURCE, "tests", "parity", "data", "kjv_1m.bin"),
               "--steps", str(STEPS), "--generate", "0", "--metrics", metrics, "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, "exit code 0 of " + " ".join(command), done.returncode, done.stdout, done.stderr)
    with open(metrics) as f:
        rows = [json.loads(line) for line in f]
    os.remove(metrics)
    return [row["loss"] for row in rows if "step" in row and "loss" in row]


def check_compression(whole):
    """Methods that begin at step 2, on two ranks at stages 1 to 3, and recomputed. Rows are pruned from step 0 on."""
    config = config_of("compression")
    for method in config["compression_training"].values():
        shared = method["shared_parameters"]
        shared["schedule_offset"] = min(shared["schedule_offset"], 2)
    first = losses(config, 2)
    check(len(first) == STEPS and first[0] != whole[0] and first[-1] < first[0], "compression changes losses, and learns",
          first, whole)
    others = {"stage 1": (dict(config, zero_optimization={"stage": 1}), 2),
              "stage 3": (dict(config, zero_optimization={"stage": 3}), 2),
              "recomputation": (config, 2, "--activation_checkpointing")}
    for what, run in others.items():
        found = losses(*run)
        apart = max(abs(a - b) for a, b in zip(first, found, strict=True))
        check(apart < 1e-3, f"compression with {what} gives the losses of stage 2", apart, found, first)


def main():
    os.makedirs(SCRATCH, exist_ok=True)
    whole = losses(config_of("zero1"), 1)
    for number, name in enumerate(("curriculum", "progressive_layer_drop", "random_ltd", "sparse_attention")):
        config = config_of(name)
        alone = losses(config, 1)
        check(len(alone) == STEPS and alone != whole, f"{name} changes losses", alone, whole)
        others = {"recomputation": (config, 1, "--activation_checkpointing"),
                  "two stages": (config, 2, "--pipeline_stages", "2"),
                  "two stages, interleaved, recomputation": (dict(config, pipeline={"schedule": "interleaved"}), 2,
                                                            "--pipeline_stages", "2", "--activation_checkpointing"),
                  "a tensor axis": (dict(config, tensor_parallel={"autotp_size": 2}), 2)}
        chosen = list(others.items())
        if os.environ.get("DS_TEST_GRID") != "all":  # two of four, so that each way is run with two features
            chosen = [chosen[number], chosen[(number + 2) % 4]]
        for what, run in chosen:
            found = losses(*run)
            apart = max(abs(a - b) for a, b in zip(alone, found, strict=True))
            check(apart < 1e-5, f"{name} with {what} gives the losses of one rank", apart, found, alone)
    check_compression(whole)
    config = config_of("progressive_layer_drop")
    config["fp16"] = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    skipped = losses(config, 2)
    check(len(skipped) == STEPS and skipped[0] < 7, "steps that overflow are skipped on both ranks alike", skipped)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The example's GPT with --device cuda against --device cpu: the same losses, step by step; a checkpoint of the GPU goes on
on the CPU.

    gpt_on_gpu.py BUILD_FOLDER SCRATCH_FOLDER

Ends with 77 (skipped) where the driver finds no GPU. With DS_TEST_DEVICE=simulated the GPU is the simulated one that
DS_CUDA_LIBRARY names; DS_TEST_DEVICE=cpu compares the CPU with itself.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys

STEPS = 10
# Losses are near 5; kernels round differently, in bf16 by more.
TOLERANCE = {"fp32": 0.002, "bf16": 0.05}
HOST = {"device": "cpu"}
CASES = [("stage 0", "fp32", 0, {}, []),
         ("stage 2", "bf16", 2, {}, []),
         ("stage 2, optimizer on the host", "fp32", 2, {"offload_optimizer": HOST}, []),
         ("stage 2, optimizer on the host", "bf16", 2, {"offload_optimizer": HOST}, []),
         ("stage 3, all on the host", "bf16", 3, {"offload_optimizer": HOST, "offload_param": HOST}, []),
         ("stage 2, activation checkpoints on the host", "bf16", 2, {}, ["--activation_checkpointing"])]


def gpu_count():
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


class Runs:
    def __init__(self, build, scratch):
        self.program = os.path.join(build, "bin/gpt")
        self.scratch = scratch
        self.count = 0

    def losses(self, device, case, steps=STEPS, more=()):
        """Trains; returns the losses of its steps."""
        _, precision, stage, offload, flags = case
        self.count += 1
        folder = os.path.join(self.scratch, str(self.count))
        os.makedirs(folder)
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
                  "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                  "bf16": {"enabled": precision == "bf16"},
                  "zero_optimization": {"stage": stage, "reduce_bucket_size": 100000, **offload}}
        if flags:
            config["activation_checkpointing"] = {"cpu_checkpointing": True}
        paths = {name: os.path.join(folder, name) for name in ("config.json", "metrics.jsonl")}
        with open(paths["config.json"], "w", encoding="utf-8") as file:
            json.dump(config, file)
        command = [self.program, "--deepspeed_config", paths["config.json"], "--steps", str(steps), "--seed", "3",
                   "--layers", "2", "--hidden", "64", "--heads", "2", "--seq_len", "64", "--generate", "0",
                   "--device", device, "--metrics", paths["metrics.jsonl"], *flags, *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}")
        with open(paths["metrics.jsonl"], encoding="utf-8") as file:
            return [line["loss"] for line in map(json.loads, file) if "loss" in line]


def compare(what, found, expected, precision):
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    print(f"{what}, {precision}: losses {expected[0]:.4f} to {expected[-1]:.4f}, largest difference {difference:.2g}",
          flush=True)
    if not expected[-1] < expected[0]:
        sys.exit("the loss does not fall: there is nothing to compare")
    if not difference <= TOLERANCE[precision]:
        sys.exit(f"expected at most {TOLERANCE[precision]}; found {found}, on the CPU {expected}")


def main():
    build, scratch = sys.argv[1:]
    device = os.environ.get("DS_TEST_DEVICE", "cuda").split(":", maxsplit=1)[0]
    if device == "cuda" and gpu_count() == 0:
        print("skipped, this test needs a GPU: the NVIDIA driver finds none")
        sys.exit(77)
    if device == "simulated":
        device = "cuda"
    shutil.rmtree(scratch, ignore_errors=True)
    runs = Runs(build, scratch)
    on_cpu = {}
    for case in CASES:
        precision = case[1]
        if precision not in on_cpu:
            # Stages and offload change no bit on the CPU.
            on_cpu[precision] = runs.losses("cpu", (None, precision, 2, {}, []))
        compare(case[0], runs.losses(device, case), on_cpu[precision], precision)

    folder = os.path.join(scratch, "checkpoint")
    for first, second in ((device, "cpu"), ("cpu", device)):
        shutil.rmtree(folder, ignore_errors=True)
        half = runs.losses(first, CASES[0], STEPS // 2, ["--save_checkpoint", folder])
        rest = runs.losses(second, CASES[0], STEPS, ["--load_checkpoint", folder])
        compare(f"saved on {first}, goes on on {second}", half + rest, on_cpu["fp32"], "fp32")
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""`ds-launch parity` on programs of the examples, unmodified: equal on two ranks at each stage and in a pipeline, different where
the run on one rank trains otherwise, and refused by name where one rank cannot take the place of two.

  parity.py BUILD SCRATCH SOURCE
"""
import json
import os
import subprocess
import sys

BUILD, SCRATCH, SOURCE = sys.argv[1:4]
STEP = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "log_level": "warning"}
GPT = ["gpt", "--deepspeed_config", "replaced.json", "--data", f"{SOURCE}/tests/parity/data/kjv_1m.bin", "--steps", "50", "--generate", "0",
       "--device", "cpu", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq_len", "32"]


def check(ok, what, *found):
    if not ok:
        sys.exit(f"expected: {what}; found: {' '.join(map(str, found))}")


def write(name, config):
    path = os.path.join(SCRATCH, name)
    with open(path, "w") as f:
        json.dump(config, f)
    return path


def parity(config, program, *flags):
    """Exit code and output."""
    command = [f"{BUILD}/bin/ds-launch", "parity", "--num_procs", "2", "--steps", "3", *flags, write("config.json", config), "--",
               f"{BUILD}/bin/{program[0]}", *program[1:]]
    done = subprocess.run(command, cwd=f"{SOURCE}/examples/01_first_step", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=120, env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    print(" ".join(command), done.stdout, sep="\n", flush=True)
    return done.returncode, done.stdout


def expect(code_and_text, code, *parts):
    found, text = code_and_text
    check(found == code and all(part in text for part in parts), f"exit code {code} and {parts}", found, text)


os.makedirs(SCRATCH, exist_ok=True)
ORDERS = "from a second run of the layout with its batches in another order"
for stage in range(4):
    flags, bounds = (["--one_order"], "a constant of fp32: --one_order") if stage % 2 else ([], ORDERS)
    program = "first_step"
    if stage == 3:  # own_data takes its batches from the engine's loader, which can give those of all ranks as one
        program, flags = "own_data", [*flags, "--global_batches"]
    expect(parity(STEP | {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 3}, [program], *flags), 0,
           f"parity: equal, 2 ranks (2 data-parallel, stage {stage}, fp32) and one rank: 3 steps, 4 parameters", bounds)
expect(parity(STEP | {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}, GPT), 0, "parity: equal, 2 ranks",
       "a constant of fp32: a second run is the same to the bit")
expect(parity(STEP | {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, GPT, "--one_order"),
       0, "parity: equal, 2 ranks", "bf16")
PIPE = STEP | {"gradient_accumulation_steps": 4, "dataloader_drop_last": True, "pipeline": {"stages": 2}}
expect(parity(PIPE, ["spirals", "--deepspeed_config", "replaced.json"]), 0,
       "parity: equal, 2 ranks (1 data-parallel, pipe 2, stage 0, fp32) and one rank: 3 steps, 16 parameters", ORDERS)
# Both stages draw their batches by a number of their own; the others read what was written down.
expect(parity(PIPE | {"train_micro_batch_size_per_gpu": 2}, [*GPT, "--pipeline_stages", "2", "--tie_embeddings"], "--replay"), 0,
       "parity: equal, 2 ranks (1 data-parallel, pipe 2", ORDERS)
expect(parity(STEP, GPT, "--replay"), 2, "expected that the engine sees the batches of the program, found none")
other = write("other.json", STEP | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-2}}})
expect(parity(STEP, ["first_step"], "--against", other, "--one_order"), 1, "parity: different", "step 1: the gradients agree, and the update of",
       "0.5 times")
expect(parity(STEP | {"gradient_allreduce_op": "sum"}, ["first_step"]), 2, "parity: ", "gradient_allreduce_op: a sum over ranks",
       "expected the run of the layout to end with exit code 0, found", "nothing is compared")

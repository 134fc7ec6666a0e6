#!/usr/bin/env python3
"""The example's GPT under ds-launch, each rank on a GPU of its own, against ranks on the CPU: the same losses.

    gpt_on_gpus.py BUILD_FOLDER SCRATCH_FOLDER

Ends with 77 (skipped) where the driver finds fewer than 4 GPUs. With DS_TEST_DEVICE=simulated GPUs are the simulated ones
that DS_CUDA_LIBRARY names.
"""

import json
import os
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
from gpt_on_gpu import compare, gpu_count  # noqa: E402

GPUS = 4
STEPS = 8
HOST = {"device": "cpu"}
STAGES = ["--layers", "4", "--pipeline_stages", "2"]


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50000, "stage3_param_persistence_threshold": 100,
                                  **keys}}


def optimizer(name, **parameters):
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **parameters}}}


def cases(scratch):
    """Name, ranks, precision, config, flags."""
    disk = {"device": "nvme", "nvme_path": scratch}
    return [
        ("stage 3, parameters in files", 2, "bf16",
         zero(3, offload_optimizer=disk, offload_param={**disk, "max_in_cpu": 0, "buffer_count": 2}), []),
        ("stage 3, updated one step late", 2, "bf16",
         zero(3, offload_optimizer={**HOST, "delayed_update": True, "delayed_update_start": 1}, offload_param=HOST), []),
        ("stage 3, autocast", 2, "fp32", {**zero(3), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, []),
        ("stage 3, activation checkpoints on the host", 2, "fp32",
         {**zero(3), "activation_checkpointing": {"cpu_checkpointing": True}}, ["--activation_checkpointing"]),
        ("ZeRO++", 4, "fp32", zero(3, zero_hpz_partition_size=2, zero_quantized_weights=True,
                                   zero_quantized_gradients=True), []),
        ("MiCS, optimizer on the host", 4, "fp32", zero(3, mics_shard_size=2, offload_optimizer=HOST), []),
        ("OneBitAdam", 3, "fp32", {**zero(1), **optimizer("OneBitAdam", freeze_step=3)}, []),
        ("ZeroOneAdam", 2, "fp32", {**zero(0), **optimizer("ZeroOneAdam", var_freeze_step=3)}, []),
        ("compressed gradients", 2, "fp32", {**zero(2), "gradient_compression": {"method": "sign"}}, []),
        ("pipeline, optimizer on the host", 4, "bf16", zero(2, offload_optimizer=HOST), STAGES),
        ("pipeline, DualPipeV, stage 3", 4, "fp32", zero(3), [*STAGES, "--pipeline_schedule", "dualpipev"]),
        ("gloo", 2, "fp32", {**zero(3, offload_param=HOST), "communication_backend": "gloo"}, []),
    ]


def losses(build, folder, device, case):
    _, ranks, precision, keys, flags = case
    os.makedirs(folder)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
              "steps_per_print": None, "bf16": {"enabled": precision == "bf16"}, **optimizer("AdamW"), **keys}
    paths = {name: os.path.join(folder, name) for name in ("config.json", "metrics.jsonl")}
    with open(paths["config.json"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    layers = [] if "--layers" in flags else ["--layers", "2"]
    command = [os.path.join(build, "bin/ds-launch"), "--num_procs", str(ranks), os.path.join(build, "bin/gpt"),
               "--deepspeed_config", paths["config.json"], "--device", device, "--steps", str(STEPS), "--seed", "3",
               "--hidden", "64", "--heads", "2", "--seq_len", "32", "--generate", "0", "--metrics", paths["metrics.jsonl"],
               *layers, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics.jsonl"], encoding="utf-8") as file:
        return [line["loss"] for line in map(json.loads, file) if "loss" in line]


def main():
    build, scratch = sys.argv[1:]
    if os.environ.get("DS_TEST_DEVICE") != "simulated" and gpu_count() < GPUS:
        print(f"skipped, this test needs {GPUS} GPUs: the NVIDIA driver finds {gpu_count()}")
        sys.exit(77)
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
    for number, case in enumerate(cases(scratch)):
        name, ranks, precision = case[:3]
        found, expected = (losses(build, os.path.join(scratch, f"{number}.{device}"), device, case)
                           for device in ("cuda", "cpu"))
        compare(f"{name}, {ranks} ranks", found, expected, precision)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

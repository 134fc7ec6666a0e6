#!/usr/bin/env python3
"""Makes schedules_reference.json: learning rates (and betas) of DeepSpeed's schedules, and scales of its loss scaler.

    DS_ACCELERATOR=cpu python schedules_reference.py      (deepspeed 0.19.8, torch 2.11)

Each schedule case: the optimizer's group learning rates, the parameters, and for each recorded step number k the values
that step runs with ("at": [[k, [lr per group], [[beta1, beta2] per group]], ...]).
"""
import json
import logging
import pathlib

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16 import loss_scaler

logging.disable(logging.CRITICAL)

SCHEDULES = [
    ("WarmupLR", {}, 1300),
    ("WarmupLR", {"warmup_num_steps": 10}, 40),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 0.01}, 20),
    ("WarmupLR", {"warmup_num_steps": 25, "warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 6e-4}, 60),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": [1e-6, 0.0], "warmup_max_lr": [1e-3, 3e-4]}, 20),
    ("WarmupDecayLR", {"total_num_steps": 100, "warmup_num_steps": 20}, 130),
    ("WarmupDecayLR", {"total_num_steps": 60, "warmup_num_steps": 8, "warmup_type": "linear", "warmup_min_lr": 1e-5,
                       "warmup_max_lr": [2e-3, 4e-3]}, 80),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 10, "warmup_max_lr": 0.1}, 30),
    ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10}, 130),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 12, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05,
                        "warmup_type": "linear"}, 70),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 9, "cos_min_ratio": 0.2}, 20),
    ("LRRangeTest", {}, 60),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-5, 1e-4], "lr_range_test_step_size": 7, "lr_range_test_step_rate": 5.0,
                     "lr_range_test_staircase": True}, 60),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 20}, 80),
    ("OneCycle", {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": [1e-3, 5e-3], "cycle_first_step_size": 13,
                  "cycle_second_step_size": 29, "decay_step_size": 5, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01,
                  "cycle_min_mom": 0.85, "cycle_max_mom": [0.95, 0.99]}, 90),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 21, "cycle_second_step_size": 10,
                  "cycle_first_stair_count": 4, "cycle_second_stair_count": 3, "decay_step_size": 2,
                  "decay_lr_rate": 1.0}, 60),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 15, "cycle_second_step_size": 0,
                  "cycle_momentum": False}, 40),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6, "cycle_first_stair_count": 2,
                  "decay_mom_rate": 0.1, "decay_step_size": 3}, 40),
]

SCALERS = [
    {"init_scale": 65536.0, "scale_window": 4, "min_scale": 1.0, "delayed_shift": 2, "consecutive_hysteresis": False},
    {"init_scale": 65536.0, "scale_window": 4, "min_scale": 1.0, "delayed_shift": 2, "consecutive_hysteresis": True},
    {"init_scale": 1024.0, "scale_window": 3, "min_scale": 1.0, "delayed_shift": 1, "consecutive_hysteresis": False},
    {"init_scale": 8.0, "scale_window": 2, "min_scale": 3.0, "delayed_shift": 3, "consecutive_hysteresis": False},
    {"init_scale": 2.0**20, "scale_window": 1, "min_scale": 1.0, "delayed_shift": 2, "consecutive_hysteresis": True},
]
# 1: the gradients of this step overflow.
OVERFLOWS = "0000110000001010000000001110000000000100010111000000000000000000010101000001111000000000000111111111111111111111"


def schedule_case(name, params, steps):
    lrs = [0.003, 0.0005]
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in lrs]
    optimizer = torch.optim.AdamW([{"params": [t], "lr": lr} for t, lr in zip(tensors, lrs)])
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    every = max(1, steps // 130)
    at = []
    for k in range(steps):
        if k < 30 or k % every == 0:
            at.append([k, [g["lr"] for g in optimizer.param_groups], [list(g["betas"]) for g in optimizer.param_groups]])
        schedule.step()
    return {"type": name, "params": params, "group_lr": lrs, "at": at}


def scaler_case(options):
    loss_scaler.dist.get_rank = lambda: 0
    scaler = loss_scaler.DynamicLossScaler(**options)
    scales, raised_at = [], None
    for i, flag in enumerate(OVERFLOWS):
        try:
            scaler.update_scale(flag == "1")
        except Exception as error:
            assert "minimum" in str(error)
            raised_at = i
            break
        scales.append([scaler.cur_scale, scaler.cur_hysteresis])
    return {"options": options, "overflows": OVERFLOWS, "after": scales, "raised_at": raised_at}


def main():
    cases = {"schedules": [schedule_case(*case) for case in SCHEDULES], "scalers": [scaler_case(o) for o in SCALERS]}
    path = pathlib.Path(__file__).with_suffix(".json")
    lines = ",\n".join(json.dumps(case) for case in cases["schedules"])
    scalers = ",\n".join(json.dumps(case) for case in cases["scalers"])
    path.write_text('{"schedules": [\n' + lines + '\n],\n"scalers": [\n' + scalers + "\n]}\n")


if __name__ == "__main__":
    main()

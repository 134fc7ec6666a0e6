#!/usr/bin/env python3
"""Makes torch_schedules_reference.json: learning rates of PyTorch's own schedules.

    python torch_schedules_reference.py      (torch 2.11)

Each case: the parameters, the groups' learning rates at the start, and the rates of each step from the first on.
"""
import json
import pathlib

import torch

CASES = [
    ("StepLR", {"step_size": 7}, 40),
    ("StepLR", {"step_size": 1, "gamma": 0.9}, 30),
    ("MultiStepLR", {"milestones": [3, 4, 4, 20], "gamma": 0.5}, 30),
    ("ConstantLR", {}, 12),
    ("ConstantLR", {"factor": 0.25, "total_iters": 9}, 15),
    ("LinearLR", {}, 12),
    ("LinearLR", {"start_factor": 0.1, "end_factor": 0.7, "total_iters": 13}, 30),
    ("ExponentialLR", {"gamma": 0.97}, 60),
    ("PolynomialLR", {}, 12),
    ("PolynomialLR", {"total_iters": 23, "power": 2.5}, 40),
    ("CosineAnnealingLR", {"T_max": 10}, 45),
    ("CosineAnnealingLR", {"T_max": 33, "eta_min": 1e-4}, 80),
    ("CosineAnnealingWarmRestarts", {"T_0": 8}, 40),
    ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2, "eta_min": 1e-5}, 120),
]

BASE = [1e-3, 0.5]


def rates(name, params, steps):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in BASE]
    optimizer = torch.optim.SGD(groups)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def main():
    cases = [{"type": name, "params": params, "base": BASE, "rates": rates(name, params, steps)}
             for name, params, steps in CASES]
    path = pathlib.Path(__file__).with_name("torch_schedules_reference.json")
    path.write_text(json.dumps({"torch": torch.__version__.split("+")[0], "cases": cases}, indent=None) + "\n")


if __name__ == "__main__":
    main()

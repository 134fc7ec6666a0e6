#!/usr/bin/env python3
"""Makes torch_schedules_reference.json: learning rates of PyTorch's own schedules.

    python torch_schedules_reference.py      (torch 2.11)

Each case: the parameters, the groups' learning rates at the start, and the rates and momenta of each step from the first on.
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
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 7}, 60),
    ("CyclicLR", {"base_lr": [0.1, 0.2], "max_lr": [0.4, 0.9], "step_size_up": 4, "step_size_down": 9, "mode": "triangular2",
                  "base_momentum": 0.7, "max_momentum": 0.95}, 60),
    ("CyclicLR", {"base_lr": 0.001, "max_lr": 0.01, "step_size_up": 5, "mode": "exp_range", "gamma": 0.98, "cycle_momentum": False}, 60),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 40}, 41),
    ("OneCycleLR", {"max_lr": [0.1, 0.3], "epochs": 4, "steps_per_epoch": 9, "pct_start": 0.25, "anneal_strategy": "linear",
                    "div_factor": 10, "final_div_factor": 100}, 37),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 50, "three_phase": True, "base_momentum": 0.8}, 51),
]

BASE = [1e-3, 0.5]


def rates(name, params, steps):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in BASE]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    found = []
    for _ in range(steps):
        found.append([[group[key] for group in optimizer.param_groups] for key in ("lr", "momentum")])
        optimizer.step()
        if len(found) < steps:
            schedule.step()
    return found


def main():
    cases = []
    for name, params, steps in CASES:
        found = rates(name, params, steps)
        cases.append({"type": name, "params": params, "base": BASE, "rates": [step[0] for step in found],
                      "momenta": [step[1][0] for step in found]})
    path = pathlib.Path(__file__).with_name("torch_schedules_reference.json")
    path.write_text(json.dumps({"torch": torch.__version__.split("+")[0], "cases": cases}, indent=None) + "\n")


if __name__ == "__main__":
    main()

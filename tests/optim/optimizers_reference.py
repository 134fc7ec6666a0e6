#!/usr/bin/env python3
"""Makes optimizers_reference.json: weights after 1, 2, 10 and 50 steps of each optimizer, from the same gradients.

    DS_ACCELERATOR=cpu TORCHDYNAMO_DISABLE=1 python optimizers_reference.py      (torch 2.11, deepspeed 0.19.8)

Adam, AdamW, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, Adadelta: torch.optim. Lamb: DeepSpeed's fused_lamb_cuda_kernel.cu written out in float64. Lion: the
formula of arXiv 2302.06675 in float64. Muon: DeepSpeed's SingleDeviceMuonWithAuxAdam (which fails on convolutions with 4 dimensions), Newton-Schulz in float32.
Weights and gradients are the splitmix64 stream of `uniform`, so that the test makes the same ones.
"""
import json
import math
import pathlib

import torch
from deepspeed.runtime.zero.muon import original_muon

MASK = (1 << 64) - 1
SIZES = [[6, 10], [10, 4], [7], [3, 5, 2], [5, 5], [9, 4]]
NAMES = ["h.weight", "tall.weight", "h.bias", "conv.weight", "square.weight", "embed.weight"]
RECORD = [1, 2, 10, 50]


def uniform(stream, numel):
    """numel values in [-1, 1), exact in float32: the top 24 bits of splitmix64."""
    values, state = [], (stream * 0x632BE59BD9B4E019) & MASK
    for _ in range(numel):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        values.append((z >> 40) / float(1 << 23) - 1.0)
    return torch.tensor(values, dtype=torch.float64).float()


def initial():
    return [uniform(i + 1, math.prod(s)).view(s) for i, s in enumerate(SIZES)]


def gradient(step, i):
    return (uniform(1000 * step + i, math.prod(SIZES[i])) * 0.5).view(SIZES[i])


def run(make_step):
    params = [torch.nn.Parameter(w.clone()) for w in initial()]
    step = make_step(params)
    record = {}
    for k in range(1, RECORD[-1] + 1):
        for i, p in enumerate(params):
            p.grad = gradient(k, i)
        step()
        if k in RECORD:
            record[str(k)] = [float(f"{v:.9g}") for p in params for v in p.detach().double().flatten().tolist()]
    return record


def torch_case(cls, **options):
    return run(lambda params: cls(params, **options).step)


class Float64:
    """An optimizer written out on float64 copies, cast back to float32 after each step."""

    def __init__(self, params, update):
        self.params, self.update, self.k = params, update, 0
        self.w = [p.detach().double() for p in params]
        self.state = [{} for _ in params]

    def step(self):
        self.k += 1
        for p, w, s in zip(self.params, self.w, self.state):
            self.update(w, p.grad.double(), s, self.k)
            p.data.copy_(w)


def lion(lr, betas, weight_decay):

    def update(w, g, s, k):
        m = s.setdefault("m", torch.zeros_like(w))
        c = betas[0] * m + (1 - betas[0]) * g
        w.mul_(1 - lr * weight_decay).sub_(lr * c.sign())
        m.mul_(betas[1]).add_(g * (1 - betas[1]))

    return lambda params: Float64(params, update).step


def lamb(lr, betas, eps, weight_decay, max_coeff=10.0, min_coeff=0.01, bias_correction=True, eps_inside_sqrt=False):

    def update(w, g, s, k):
        m, v = s.setdefault("m", torch.zeros_like(w)), s.setdefault("v", torch.zeros_like(w))
        m.mul_(betas[0]).add_(g * (1 - betas[0]))
        v.mul_(betas[1]).add_(g * g * (1 - betas[1]))
        denom = (v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps
        u = m / denom + weight_decay * w
        w_norm, u_norm = w.norm(), u.norm()
        coeff = 1.0
        if w_norm != 0 and u_norm != 0:
            coeff = min(max((w_norm / u_norm).item(), min_coeff), max_coeff)
        step_size = lr
        if bias_correction:
            step_size = lr * math.sqrt(1 - betas[1]**k) / (1 - betas[0]**k)
        w.sub_(step_size * coeff * u)

    return lambda params: Float64(params, update).step


def muon(ns_method, weight_decay):
    original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32

    def make(params):
        is_muon = [len(s) >= 2 and "embed" not in n and "lm_head" not in n for s, n in zip(SIZES, NAMES)]
        groups = [
            dict(params=[p for p, m in zip(params, is_muon) if m], use_muon=True, ns_method=ns_method, lr=0.02,
                 momentum=0.95, weight_decay=weight_decay),
            dict(params=[p for p, m in zip(params, is_muon) if not m], use_muon=False, lr=3e-3, betas=(0.9, 0.95),
                 eps=1e-10, weight_decay=weight_decay)
        ]
        return original_muon.SingleDeviceMuonWithAuxAdam(groups).step

    return make


def main():
    o = torch.optim
    cases = {
        "adamw_fused": torch_case(o.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
        "adamw_foreach": torch_case(o.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
        "adam_fused": torch_case(o.Adam, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, fused=True),
        "adam_foreach": torch_case(o.Adam, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, foreach=True),
        "adamw_amsgrad": torch_case(o.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True),
        "sgd": torch_case(o.SGD, lr=0.05, weight_decay=0.01),
        "sgd_momentum": torch_case(o.SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
        "sgd_nesterov": torch_case(o.SGD, lr=0.05, momentum=0.9, nesterov=True),
        "adagrad": torch_case(o.Adagrad, lr=0.05, lr_decay=0.02, weight_decay=0.01, initial_accumulator_value=0.1),
        "adagrad_default": torch_case(o.Adagrad, lr=0.01, eps=1e-10),
        "rmsprop": torch_case(o.RMSprop, lr=0.01, weight_decay=0.01, momentum=0.5, centered=True),
        "rmsprop_default": torch_case(o.RMSprop, foreach=False),
        "adamax": torch_case(o.Adamax, lr=0.01, betas=(0.8, 0.95), weight_decay=0.01),
        "nadam": torch_case(o.NAdam, lr=0.01, weight_decay=0.01),
        "nadam_decoupled": torch_case(o.NAdam, weight_decay=0.1, momentum_decay=0.02, decoupled_weight_decay=True),
        "radam": torch_case(o.RAdam, lr=0.01, betas=(0.9, 0.99), weight_decay=0.01),
        "radam_decoupled": torch_case(o.RAdam, weight_decay=0.1, decoupled_weight_decay=True),
        "adadelta": torch_case(o.Adadelta, weight_decay=0.01),
        "lion": run(lion(1e-2, (0.9, 0.99), 0.1)),
        "lamb": run(lamb(1e-2, (0.9, 0.999), 1e-8, 0.01)),
        "lamb_eps_inside": run(lamb(1e-2, (0.9, 0.99), 1e-4, 0.0, 0.5, 0.08, False, True)),
        "muon_gram": run(muon("gram", 0.1)),
        "muon_standard": run(muon("standard", 0.0)),
    }
    lines = ",\n".join(json.dumps(name) + ": " + json.dumps(record) for name, record in cases.items())
    pathlib.Path(__file__).with_suffix(".json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()

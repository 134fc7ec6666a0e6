#!/usr/bin/env python3
"""Writes pieces.pt2, pieces_eval.pt2, decomposed.pt2 and pieces.json into tests/exported/data: what the models of models.py
do not have, in small modules, and what eager Python computes with them; and two_programs.pt2. Needs torch 2.11.

pieces.json: for each file the outputs of forward by name, the gradients' norms of the sum of all floating-point outputs, and
buffers afterwards. Inputs are numbers(rows, sign) of 6 rows.
"""
import json
import os

import torch
from torch import nn
from torch.export import Dim
from torch.export.pt2_archive._package import package_pt2

from export_models import OUT, shorten_traces

ROWS, WIDTH = 6, 8


class Pieces(nn.Module):

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("once", torch.full((WIDTH, ), 0.5), persistent=False)
        self.scale = torch.full((WIDTH, ), 2.0)

    def forward(self, x, mask, shift: int = 3, rate: float = 0.25, absent=None):
        rows = x.shape[0]
        with torch.no_grad():
            still = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = self.b(x)
        chosen = torch.cond(x.sum() > 0, lambda z: self.a(z), lambda z: self.b(z), (x, ))
        z = self.c(x).masked_fill(mask, 0.0) * self.scale * self.once + shift
        self.average.mul_(1 - rate).add_(z.detach().mean(0), alpha=rate)
        self.count = self.count + 1
        if self.training:
            z = z * 3
        joined = torch.cat([z, z]).reshape(rows * 2 * WIDTH)
        top = torch.topk(joined, 2)
        loss = joined.sum() / (rows * WIDTH) + torch.ones(rows * 3 + 1, device=x.device).sum() * (rows - 1) + x.new_full((rows, ), rows / 4).sum()
        return {"loss": loss, "parts": (still, narrow.float(), chosen), "top": top.values, "rows": rows * 2, "absent": absent}


class Normalized(nn.Module):

    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.bn(self.fc(x)).relu()


class Encoded(nn.Module):
    """Two methods of one model, which are two programs of one file: whole(x), and its first layer alone."""

    def __init__(self, encoder=None):
        super().__init__()
        self.encoder = encoder or nn.Linear(WIDTH, 4)
        self.head = nn.Linear(4, 2) if encoder is None else nn.Identity()

    def forward(self, x):
        return self.head(self.encoder(x).tanh())


def numbers(rows, sign):
    return torch.arange(rows * WIDTH).float().sin().view(rows, WIDTH) * 0.5 + sign * 0.1


def leaves(value, name=""):
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in leaves(one, f"{name}.{key}" if name else key)]
    if isinstance(value, (list, tuple)):
        return [leaf for i, one in enumerate(value) for leaf in leaves(one, f"{name}.{i}" if name else str(i))]
    return [(name or "0", value)]


def golden(make, mode, sign):
    module = make().train(mode)
    inputs = (numbers(ROWS, sign), numbers(ROWS, 0) > 0.3) if isinstance(module, Pieces) else (numbers(ROWS, sign), )
    outputs = leaves(module(*inputs))
    sum(one.double().sum() for _, one in outputs if isinstance(one, torch.Tensor) and one.requires_grad).backward()
    return {
        "outputs": {name: one.double().flatten().tolist() if isinstance(one, torch.Tensor) else one for name, one in outputs},
        "gradients": {name: p.grad.double().norm().item() for name, p in module.named_parameters() if p.grad is not None},
        "buffers": {name: b.double().flatten().tolist() for name, b in module.state_dict().items() if "." not in name or "bn.r" in name},
    }


def save(program, name):
    shorten_traces(program.graph_module)
    torch.export.save(program, os.path.join(OUT, f"{name}.pt2"))


def made(kind):
    torch.manual_seed(0)
    return kind()


def main():
    torch.set_num_threads(1)
    rows = Dim("rows", min=2, max=64)
    example = (numbers(4, 1), numbers(4, 0) > 0.3)
    for mode, name in ((True, "pieces"), (False, "pieces_eval")):
        dynamic = {"x": {0: rows}, "mask": {0: rows}, "shift": None, "rate": None, "absent": None}
        module = made(Pieces).train(mode)
        save(torch.export.export(module, (*example, 3, 0.25, None), dynamic_shapes=dynamic, strict=False), name)
    program = torch.export.export(made(Normalized), (numbers(4, 1), ), dynamic_shapes={"x": {0: rows}}, strict=False)
    save(program.run_decompositions(), "decomposed")
    whole = made(Encoded)
    programs = {}
    for name, module in {"model": whole, "encode": Encoded(whole.encoder)}.items():
        programs[name] = torch.export.export(module, (numbers(4, 1), ), dynamic_shapes={"x": {0: rows}}, strict=False)
        shorten_traces(programs[name].graph_module)
    package_pt2(os.path.join(OUT, "two_programs.pt2"), exported_programs=programs)
    result = {
        "pieces": {"+": golden(lambda: made(Pieces), True, 1), "-": golden(lambda: made(Pieces), True, -1)},
        "pieces_eval": {"+": golden(lambda: made(Pieces), False, 1)},
        "decomposed": {"+": golden(lambda: made(Normalized), True, 1)},
    }
    with open(os.path.join(OUT, "pieces.json"), "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()

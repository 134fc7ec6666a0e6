#!/usr/bin/env python3
"""What torch's DistributedDataParallel does with the network, batches and loops of replicas.h: writes torch_ddp.json.

  python tests/loops/torch_ddp.py            (needs torch)

Ranks are processes, with gloo. Values are float32 with nine digits.
"""
import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

STEPS = 50
BATCHES = [3, 8, 5]  # of the ranks of a join


class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 9)
        self.left = torch.nn.Linear(9, 5)
        self.right = torch.nn.Linear(9, 5)
        self.last = torch.nn.Linear(5, 2)
        with torch.no_grad():
            for offset, parameter in enumerate(self.parameters()):
                flat = torch.sin(torch.arange(parameter.numel(), dtype=torch.float) * 0.7 + offset) * 0.4
                parameter.copy_(flat.view(parameter.shape))

    def forward(self, x, way="both"):
        h = torch.tanh(self.first(x))
        if way == "left":
            return self.last(self.left(h))
        if way == "right":
            return self.last(self.right(h))
        return self.last(torch.tanh(self.left(h)) * self.right(h))


def batch_of(rank, step):
    return torch.cos(torch.arange(28, dtype=torch.float) * 0.37 + rank * 3 + step * 1.7).view(4, 7)


def loss_of(y):
    return (y - 0.3).pow(2).mean()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.003, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


def numbers(tensors):
    """All elements in one list; null for a tensor that is not there."""
    return [None if t is None else [float(f"{v:.9g}") for v in t.detach().reshape(-1).tolist()] for t in tensors]


def trained(rank, name):
    model = Toy()
    ddp = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp(batch_of(rank, step))).backward()
        optimizer.step()
    return numbers(model.parameters())


def joined(rank, by_world):
    model = Toy()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Join([ddp], divide_by_initial_world_size=by_world):
        for step in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss_of(ddp(batch_of(rank, step))).backward()
            optimizer.step()
    return numbers(model.parameters())


def unused(rank):
    """Gradients after each of some passes, that add up, in which ranks go ways of their own."""
    model = Toy()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    result = []
    for step, ways in enumerate([("left", "left"), ("left", "right"), ("right", "right"), ("both", "left")]):
        loss_of(ddp(batch_of(rank, step), ways[rank])).backward()
        result.append(numbers(p.grad for p in model.parameters()))
    with ddp.no_sync():
        loss_of(ddp(batch_of(rank, 4))).backward()
    loss_of(ddp(batch_of(rank, 5))).backward()
    result.append(numbers(p.grad for p in model.parameters()))
    return result


def run(rank, world, store, path):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    if world == 2:
        found = {"optimizers": {name: trained(rank, name) for name in OPTIMIZERS}, "unused": unused(rank)}
    else:
        found = {"join": {str(by_world).lower(): joined(rank, by_world) for by_world in (True, False)}}
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    result = {"torch": torch.__version__.split("+")[0]}
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, len(BATCHES)):
            found = os.path.join(folder, f"found{world}")
            mp.spawn(run, (world, os.path.join(folder, f"store{world}"), found), world)
            result.update(json.loads(pathlib.Path(found).read_text()))
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")

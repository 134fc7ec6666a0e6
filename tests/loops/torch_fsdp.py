#!/usr/bin/env python3
"""What torch's FSDP2 makes of the network and loops of torch_ddp.py, and what autocast, with torch's GradScaler in
float16, makes of both wrappers: writes torch_fsdp.json.

  python tests/loops/torch_fsdp.py            (needs torch)

Ranks are processes, with gloo. Parameters after 50 steps: float32 ones with nine digits, of autocast with six.
"""
import contextlib
import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_ddp import OPTIMIZERS, STEPS, Toy, batch_of, loss_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def sharded(mesh, reshard_after_forward):
    """Every layer a unit, then the model, as the tutorial does."""
    model = Toy()
    for layer in model.children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def train(model, run, rank, optimizer, dtype):
    """Returns the scale after the last step, and how many steps were left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=8, enabled=dtype == torch.float16)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = loss_of(run(batch_of(rank, step)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return {"scale": scaler.get_scale(), "skipped": skipped}


def values_of(model, digits):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [[float(f"{v:.{digits}g}") for v in p.detach().reshape(-1).tolist()] for p in whole]


def trained(rank, name, dtype, mesh=None, reshard_after_forward=True):
    model = sharded(mesh, reshard_after_forward) if mesh else Toy()
    run = model if mesh else DistributedDataParallel(model)
    found = train(model, run, rank, OPTIMIZERS[name](model.parameters()), dtype)
    found["values"] = values_of(model, 6 if dtype else 9)
    return found


def trained_both_ways(rank, name, dtype, mesh):
    """Torch's numbers do not depend on whether parameters stay after forward: recorded once."""
    found = trained(rank, name, dtype, mesh, True)
    assert found == trained(rank, name, dtype, mesh, False), (name, dtype)
    return found


def of_all(what):
    return {name: what(name) for name in OPTIMIZERS}


def run(rank, world, store, path):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    meshes = {f"{world} shards": init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes["2 copies of 2 shards"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for kind, mesh in meshes.items():
        found[kind] = {"float32": of_all(lambda name: trained_both_ways(rank, name, None, mesh)["values"])}
        if kind == "4 shards":
            continue
        for key, dtype in DTYPES.items():
            found[kind][key] = of_all(lambda name: trained_both_ways(rank, name, dtype, mesh))
    if world == 2:
        found["replicas"] = {k: of_all(lambda name: trained(rank, name, dtype)) for k, dtype in DTYPES.items()}
    every = [None] * world
    dist.all_gather_object(every, found)
    assert all(one == found for one in every), "torch's ranks do not agree"
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    result = {"torch": torch.__version__.split("+")[0]}
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            found = os.path.join(folder, f"found{world}")
            mp.spawn(run, (world, os.path.join(folder, f"store{world}"), found), world)
            result.update(json.loads(pathlib.Path(found).read_text()))
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")

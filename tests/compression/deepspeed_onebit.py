#!/usr/bin/env python3
"""Writes deepspeed_onebit.json: what DeepSpeed's own OnebitAdam, OnebitLamb and ZeroOneAdam make of known gradients.

    pip download --no-deps --no-binary :all: deepspeed==0.16.5   # and unpack it; versions up to 0.19.6 have the classes
    DS_ACCELERATOR=cpu PYTHONPATH=deepspeed-0.16.5 tests/compression/deepspeed_onebit.py

Two processes over gloo. DeepSpeed packs bits with cupy or a kernel of its own; here numpy does, all else is theirs. One
parameter of 64 elements, so that each of its two parts is what one rank serves, in DeepSpeed and here.
"""
import json
import os
import sys
import tempfile

import numpy
import torch
import torch.multiprocessing as processes

RANKS = 2
ELEMENTS = 64
STEPS = 40
CASES = {
    "OneBitAdam": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "freeze_step": 15},
    "OneBitLamb": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "freeze_step": 15},
    "ZeroOneAdam": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0, "var_freeze_step": 15,
                    "var_update_scaler": 3, "local_step_scaler": 6, "local_step_clipper": 4},
}


def first_weights():
    return torch.sin(torch.arange(ELEMENTS, dtype=torch.float64) * 0.7).mul(0.4).float()


def gradient(rank, step):
    """Of step `step`, from 1."""
    return torch.sin(torch.arange(ELEMENTS, dtype=torch.float64) * 0.37 + 1.9 * rank + 0.61 * step).mul(0.1).float()


def make_backend():
    from deepspeed.runtime.comm.compressed import CompressedBackend

    class Backend(CompressedBackend):
        def __init__(self):
            self.world_group = torch.distributed.group.WORLD
            self.size = RANKS
            self.rank = torch.distributed.get_rank()

        def pack(self, values, size):
            bits = numpy.packbits((values.numpy() >= 0).reshape(size, -1), axis=1)
            return torch.from_numpy(bits)

        def unpack(self, values, size, dtype):
            bits = numpy.unpackbits(values.numpy()).reshape(size, -1)
            return torch.from_numpy(bits).to(dtype).mul_(2).sub_(1)

    return Backend()


class Engine:
    """What the optimizers use of DeepSpeed's engine."""
    enable_backward_allreduce = True
    local_rank = 0
    mpu = None


def run(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    import deepspeed
    from deepspeed.runtime.comm import compressed
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    # gloo wants equal shapes; a scale of theirs has none.
    compressed.dist.all_gather = lambda parts, own, group=None: torch.distributed.all_gather(
        parts, own.reshape(parts[0].shape))
    compressed.CompressedBackend = type(make_backend())
    compressed.CompressedBackend.__new__ = staticmethod(lambda cls, mpu=None: object.__new__(cls))
    original = compressed.CompressedBackend.__init__
    compressed.CompressedBackend.__init__ = lambda self, mpu=None: original(self)
    kinds = {"OneBitAdam": OnebitAdam, "OneBitLamb": OnebitLamb, "ZeroOneAdam": ZeroOneAdam}
    result = {}
    for name, settings in CASES.items():
        weights = torch.nn.Parameter(first_weights())
        engine = Engine()
        optimizer = kinds[name]([weights], deepspeed=engine, comm_backend_name="compressed", **settings)
        history = []
        for step in range(1, STEPS + 1):
            own = gradient(rank, step)
            if engine.enable_backward_allreduce:
                own = sum(gradient(other, step) for other in range(RANKS)) / RANKS
            weights.grad = own
            optimizer.step()
            history.append(weights.detach().tolist())
        result[name] = {str(step): history[step - 1] for step in (1, 2, 15, 16, 17, 28, STEPS)}
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)


def main():
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run, args=(folder,), nprocs=RANKS)
        ranks = []
        for rank in range(RANKS):
            with open(os.path.join(folder, f"{rank}.json"), encoding="utf-8") as file:
                ranks.append(json.load(file))
    import deepspeed
    out = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "elements": ELEMENTS, "cases": {}}
    for name, settings in CASES.items():
        rounded = [{step: [float(f"{value:.9g}") for value in values] for step, values in rank[name].items()}
                   for rank in ranks]
        out["cases"][name] = {"settings": settings, "ranks": rounded}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_onebit.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    sys.exit(main())

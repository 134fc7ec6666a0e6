#!/usr/bin/env python3
"""Steps of a GPT in torch from Python, the model of gpu_bench, for numbers beside gpu_bench's. benchmarks/gpu/measure.py
runs it where the machine's Python has torch.

    peer.py KIND [--layers 20 --hidden 2048 --heads 16 --seq_len 1024 --vocab 256 --batch 8] [--steps 6]
            [--activation_checkpointing]

KIND   autocast    float32 parameters, autocast to bf16
       compiled    the same with each block compiled by torch.compile
       fsdp2       fully_shard on each block and the model, bf16 by MixedPrecisionPolicy, one rank on NCCL
all with torch's fused AdamW. As gpu_bench, --steps steps that wait for the device after each part, then as many in which
nothing waits. Prints one JSON object.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity"))

import torch  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gpt import GPT, Cfg  # noqa: E402


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["autocast", "compiled", "fsdp2"])
    for name, default in (("layers", 20), ("hidden", 2048), ("heads", 16), ("seq_len", 1024), ("vocab", 256), ("batch", 8),
                          ("steps", 6), ("warmup", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu only to try the program")
    return parser.parse_args()


def make_model(options):
    with torch.device(options.device):
        model = GPT(Cfg(layers=options.layers, d=options.hidden, heads=options.heads, T=options.seq_len, vocab=options.vocab))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    for block in model.h:
        if options.kind == "compiled":
            block.compile()
        if options.activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def shard(model, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    kind = torch.device(options.device).type
    store = os.path.join(tempfile.mkdtemp(), "store")
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=0,
                                         world_size=1)
    mesh = init_device_mesh(kind, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    options = parse_arguments()
    device = torch.device(options.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = make_model(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.kind == "fsdp2":
        shard(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(options.vocab, (options.batch, options.seq_len + 1), device=device)
    data, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    narrow = options.kind != "fsdp2"

    def forward():
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            return model(data, target)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    parts = {"forward": [], "backward": [], "update": []}
    losses = []
    for number in range(-options.warmup, options.steps):
        taken = []
        begin = time.perf_counter()
        loss = forward()
        for part in (lambda: None, loss.backward, update):
            part()
            wait()
            taken.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        losses.append(loss.item())
        if number >= 0:
            for name, seconds in zip(parts, taken):
                parts[name].append(seconds)
    del loss
    begin = time.perf_counter()
    for _ in range(options.steps):
        forward().backward()
        update()
    wait()
    free_running = (time.perf_counter() - begin) / options.steps
    result = {"parameters": parameters, "tokens_a_step": options.batch * options.seq_len,
              **{f"{name}_seconds": statistics.median(seconds) for name, seconds in parts.items()},
              "step_seconds": free_running, "first_loss": losses[0], "last_loss": losses[-1]}
    if device.type == "cuda":
        result["device_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["device_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    print(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the checkpoint benchmark in Python, CPU, gloo. Started by compare.py.

  peer.py KIND FOLDER LAYERS WIDTH ROWS ROUNDS    KIND: torch (DDP, torch.save by rank 0), dcp (FSDP2), ds0 to ds3
"""
import json
import os
import shutil
import sys
import time

KIND, FOLDER = sys.argv[1], sys.argv[2]
LAYERS, WIDTH, ROWS, ROUNDS = map(int, sys.argv[3:7])
BESIDE = 3  # steps beside an asynchronous save


def main():
    import torch
    import torch.distributed as dist
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    torch.manual_seed(1)
    model, x = Stack(), torch.ones(ROWS, WIDTH)
    asynchronous = None
    if KIND.startswith("ds"):
        import deepspeed
        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
            "train_micro_batch_size_per_gpu": ROWS, "steps_per_print": 1000000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
            "zero_optimization": {"stage": int(KIND[2]), "overlap_comm": False}})

        def step():
            engine.backward(engine(x))
            engine.step()

        def save(tag):
            engine.save_checkpoint(FOLDER, tag=tag)

        def load(tag):
            engine.load_checkpoint(FOLDER, tag=tag)
    else:
        dist.init_process_group("gloo")
        if KIND == "dcp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            net = model
        else:
            net = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

        def step():
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        if KIND == "dcp":
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

            def state():
                weights, states = get_state_dict(net, optimizer)
                return {"model": weights, "optimizer": states}

            def save(tag):
                dcp.save(state(), checkpoint_id=os.path.join(FOLDER, tag))

            def load(tag):
                found = state()
                dcp.load(found, checkpoint_id=os.path.join(FOLDER, tag))
                set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

            def asynchronous(tag):
                return dcp.async_save(state(), checkpoint_id=os.path.join(FOLDER, tag))
        else:
            def save(tag):
                if dist.get_rank() == 0:
                    torch.save({"model": net.module.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(FOLDER, tag))

            def load(tag):
                found = torch.load(os.path.join(FOLDER, tag), weights_only=True)
                net.module.load_state_dict(found["model"])
                optimizer.load_state_dict(found["optimizer"])

    def seconds(action):
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    def remove(tag):
        dist.barrier()
        path = os.path.join(FOLDER, tag)
        if dist.get_rank() == 0:
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        dist.barrier()

    def durable(action):
        """`action`, and until its files are on the disk."""
        def both():
            action()
            dist.barrier()
            if dist.get_rank() == 0:
                os.sync()
        return seconds(both)

    def steps():
        for _ in range(BESIDE):
            step()

    step()
    saves, durables, loads, plain, stalls = [], [], [], [], []
    for i in range(ROUNDS + 1):
        os.sync()
        saves.append(seconds(lambda: save(f"sync{i}")))
        remove(f"sync{i}")
        os.sync()
        durables.append(durable(lambda: save(f"sync{i}")))
        loads.append(seconds(lambda: load(f"sync{i}")))
        remove(f"sync{i}")
    for i in range(ROUNDS + 1 if asynchronous else 0):
        waiting = []

        def beside():
            waiting.append(asynchronous(f"async{i}"))
            steps()
        plain.append(seconds(steps))
        stalls.append(seconds(beside) - plain[-1])
        waiting[0].result()
        remove(f"async{i}")
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"save": saves[1:], "durable": durables[1:], "load": loads[1:],
                                      "step": [t / BESIDE for t in plain[1:]], "stall": stalls[1:]}), flush=True)


if __name__ == "__main__":
    main()

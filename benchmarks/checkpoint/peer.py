"""One rank of the checkpoint benchmarks in Python, CPU, gloo. Started by compare.py and beside.py.

  peer.py KIND FOLDER LAYERS WIDTH ROWS ROUNDS [--not_durable] [--beside STEPS]

KIND: torch (DDP, torch.save by rank 0), dcp (FSDP2, torch.distributed.checkpoint), ds0 to ds3 (DeepSpeed). Beside training, dcp
only: dcp-thread (async_save as it comes: copies, then returns), dcp-staged (its copy beside the step too; the update waits for
it), dcp-process (so, and written by a process of its own).
"""
import argparse
import json
import os
import shutil
import time


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("kind")
    p.add_argument("folder")
    for name in ("layers", "width", "rows", "rounds"):
        p.add_argument(name, type=int)
    p.add_argument("--not_durable", action="store_true")
    p.add_argument("--beside", type=int, default=0)
    return p.parse_args()


def stack(a):
    import torch

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(a.width, a.width, bias=False) for _ in range(a.layers))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    torch.manual_seed(1)
    return Stack()


def make_durable(path):
    """fsync of what lies below a folder, or of a file, and of the folders: what dsengine does in its save."""
    import torch.distributed as dist
    dist.barrier()
    files = [path] if os.path.isfile(path) else [os.path.join(f, n) for f, _, names in os.walk(path) for n in names]
    folders = [os.path.dirname(path)] + ([f for f, _, _ in os.walk(path)] if os.path.isdir(path) else [])
    for place in sorted(files)[dist.get_rank()::dist.get_world_size()] + (folders if dist.get_rank() == 0 else []):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Deepspeed:
    def __init__(self, a, model, x):
        import deepspeed
        deepspeed.init_distributed("gloo")
        self.a, self.x = a, x
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
            "train_micro_batch_size_per_gpu": a.rows, "steps_per_print": 1000000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
            "zero_optimization": {"stage": int(a.kind[2]), "overlap_comm": False}})

    def step(self):
        self.engine.backward(self.engine(self.x))
        self.engine.step()

    def save(self, tag):
        self.engine.save_checkpoint(self.a.folder, tag=tag)
        if not self.a.not_durable:
            make_durable(os.path.join(self.a.folder, tag))

    def load(self, tag):
        self.engine.load_checkpoint(self.a.folder, tag=tag)


class Torch:
    def __init__(self, a, model, x):
        import torch
        self.a, self.x = a, x
        self.net = self.wrap(model)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)

    def wrap(self, model):
        import torch
        return torch.nn.parallel.DistributedDataParallel(model)

    def step(self):
        self.net(self.x).backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def before_update(self):
        pass

    def save(self, tag):
        import torch
        import torch.distributed as dist
        path = os.path.join(self.a.folder, tag)
        if dist.get_rank() == 0:
            torch.save({"model": self.net.module.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        if not self.a.not_durable:
            make_durable(path)

    def load(self, tag):
        import torch
        found = torch.load(os.path.join(self.a.folder, tag), weights_only=True)
        self.net.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])


class Dcp(Torch):
    staging = None  # of the save in flight

    def wrap(self, model):
        import torch.distributed as dist
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # Collectives of an asynchronous save run beside those of the steps: on one gloo group they would meet.
        self.saves = dist.new_group(backend="gloo")
        self.planner = DefaultSavePlanner(enable_plan_caching=True)
        return model

    def state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        weights, states = get_state_dict(self.net, self.optimizer)
        return {"model": weights, "optimizer": states}

    def how(self, tag):
        from torch.distributed.checkpoint import FileSystemWriter
        return {"storage_writer": FileSystemWriter(os.path.join(self.a.folder, tag), single_file_per_rank=True, thread_count=1,
                                                   sync_files=not self.a.not_durable),
                "planner": self.planner, "process_group": self.saves}

    def save(self, tag):
        import torch.distributed.checkpoint as dcp
        dcp.save(self.state(), **self.how(tag))

    def load(self, tag):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict
        found = self.state()
        dcp.load(found, checkpoint_id=os.path.join(self.a.folder, tag), process_group=self.saves)
        set_state_dict(self.net, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def start(self, tag):
        """Returns what waits for the end of an asynchronous save."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        how = self.how(tag)
        kind = self.a.kind.partition("-")[2]
        if kind == "process":
            del how["planner"]  # its caches are not for another process
            how["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if kind in ("process", "staged"):
            # One for each save: torch 2.11 empties it behind the first. Pinned memory and copies that do not block are for
            # accelerators.
            how["async_stager"] = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=kind == "process",
                                                               use_async_staging=True, use_non_blocking_copy=False))
        response = dcp.async_save(self.state(), **how)
        if kind == "thread":
            return response.result
        self.staging = response.staging_completion
        return response.upload_completion.result

    def before_update(self):
        if self.staging:
            self.staging.result()
            self.staging = None


def main():
    a = arguments()
    import torch
    import torch.distributed as dist
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    kind = Deepspeed if a.kind.startswith("ds") else Dcp if a.kind.startswith("dcp") else Torch
    if kind is not Deepspeed:
        dist.init_process_group("gloo")
    run = kind(a, stack(a), torch.ones(a.rows, a.width))

    def seconds(action):
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    def remove(tag):
        dist.barrier()
        path = os.path.join(a.folder, tag)
        if dist.get_rank() == 0:
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        dist.barrier()

    run.step()
    result = {}

    def note(key, value, i):
        if i > 0:  # the first warms the allocator
            result.setdefault(key, []).append(value)

    for i in range(a.rounds + 1):
        if a.beside == 0:
            tag = f"sync{i}"
            note("save", seconds(lambda: run.save(tag)), i)
            note("load", seconds(lambda: run.load(tag)), i)
            remove(tag)
            continue
        for k in range(3):
            how = ("plain", "sync", "async")[(i + k) % 3]
            tag, waiting, block = f"{how}{i}", [], [0.0]
            if how == "sync":
                block = [seconds(lambda: run.save(tag))]
            if how == "async":
                block = [seconds(lambda: waiting.append(run.start(tag)))]
            block += [seconds(run.step) for _ in range(a.beside)]
            note(how, block, i)
            if how == "async":
                note("end", seconds(waiting[0]), i)
            if how != "plain":
                remove(tag)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

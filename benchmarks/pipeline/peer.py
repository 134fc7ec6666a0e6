"""One rank of a pipeline in Python: DeepSpeed or torch.distributed.pipelining, CPU, gloo. Started by compare.py.

  peer.py KIND SETTINGS OUT       KIND: "ds", or of which torch schedule: TORCH_SCHEDULES; SETTINGS: JSON, see compare.py;
                                  writes OUT.<rank> as JSON
"""
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "peers"), os.path.join(HERE, "..", "..", "tests", "parity")]
# Class, stages a rank, and whether the second ones go down again as a V. torch has no ZB-H1 of this name: its interleaved
# ZB1P with one stage a rank is it.
TORCH_SCHEDULES = {"gpipe": ("ScheduleGPipe", 1, False), "1f1b": ("Schedule1F1B", 1, False),
                   "interleaved": ("ScheduleInterleaved1F1B", 2, False), "zb_h1": ("ScheduleInterleavedZeroBubble", 1, False),
                   "zbv": ("ScheduleZBVZeroBubble", 2, True), "dualpipev": ("ScheduleDualPipeV", 2, True)}


def pin(rank):
    """To one core, as ds-launch --bind_cores_to_rank does."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def make_layers(config):
    """The GPT as layers, each a class and its arguments: embedding, blocks, head. Layers fill their own weights, the same as
    those of the whole model."""
    import torch
    from torch import nn
    from gpt import Block, init_tensor, param_specs

    def fill(module, prefix):
        specs = {name: (i, shape, kind) for i, (name, shape, kind) in enumerate(param_specs(config))}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                i, shape, kind = specs[prefix + name]
                if isinstance(kind, str):
                    parameter.fill_(1.0 if kind == "one" else 0.0)
                else:
                    parameter.copy_(torch.from_numpy(init_tensor(i, shape, kind)))

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(config.vocab, config.d)
            self.wpe = nn.Embedding(config.T, config.d)
            fill(self, "")

        def forward(self, x):
            return self.wte(x) + self.wpe(torch.arange(x.shape[1]))

    class NumberedBlock(Block):
        def __init__(self, i):
            super().__init__(config)
            fill(self, f"h.{i}.")

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_f = nn.LayerNorm(config.d)
            self.head = nn.Linear(config.d, config.vocab, bias=False)
            fill(self, "")

        def forward(self, x):
            return self.head(self.ln_f(x))

    return [(Embedding, ()), *((NumberedBlock, (i,)) for i in range(config.layers)), (Head, ())]


def deepspeed_pipeline(settings, layers, loss_of, micro_batch):
    """A function of a step's number that trains it and returns the mean loss, and the module."""
    import deepspeed
    from compare import optimizer_section
    from deepspeed.pipe import LayerSpec, PipelineModule
    deepspeed.init_distributed("gloo")
    module = PipelineModule([LayerSpec(kind, *arguments) for kind, arguments in layers], num_stages=int(os.environ["WORLD_SIZE"]),
                            loss_fn=loss_of, partition_method="parameters", activation_checkpoint_interval=0)
    optimizer = optimizer_section(settings["lr"])
    optimizer["params"].update(torch_adam=True, fused=True)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config={
        "train_micro_batch_size_per_gpu": settings["micro_batch"], "gradient_accumulation_steps": settings["micro_batches"],
        "gradient_clipping": 0, "steps_per_print": 1000000, "optimizer": optimizer})

    def step(s):
        first = s * settings["micro_batches"]
        return engine.train_batch(micro_batch(first + m) for m in range(settings["micro_batches"])).item()
    return step, module, [int(bound) for bound in module.parts]


def make_stage(*arguments):
    """A PipelineStage without the messages that set up NCCL's connections: in a V one goes from a rank to itself, which gloo,
    connected already, does not have."""
    from torch.distributed import pipelining

    class Stage(pipelining.PipelineStage):
        def _get_init_p2p_neighbors_ops(self):
            return []
    return Stage(*arguments)


def torch_pipeline(kind, settings, layers, loss_of, micro_batch):
    import torch
    from torch.distributed import pipelining
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    name, chunks, v_shape = TORCH_SCHEDULES[kind]
    stages = world * chunks
    blocks = settings["layers"] // stages
    bounds = [0, *(1 + blocks * (s + 1) for s in range(stages - 1)), len(layers)]
    own = [rank, stages - 1 - rank] if v_shape else [rank + world * chunk for chunk in range(chunks)]
    modules = torch.nn.ModuleList(torch.nn.Sequential(*(layer(*arguments) for layer, arguments in layers[bounds[s]:bounds[s + 1]]))
                                  for s in own)
    parts = [make_stage(module, s, stages, torch.device("cpu")) for module, s in zip(modules, own)]
    schedule = getattr(pipelining.schedules, name)(parts if chunks > 1 or "Interleaved" in name else parts[0],
                                                   n_microbatches=settings["micro_batches"], loss_fn=loss_of)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=settings["lr"], weight_decay=0.01, fused=True)

    def step(s):
        first = s * settings["micro_batches"]
        x, y = (torch.cat(part) for part in zip(*(micro_batch(first + m) for m in range(settings["micro_batches"]))))
        losses = [] if stages - 1 in own else None
        schedule.step(*([x] if 0 in own else []), target=y if losses is not None else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None
    return step, modules, bounds


def main():
    kind, settings, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    pin(rank)
    import torch
    torch.set_num_threads(1)
    from gpt import Cfg, batch, loss_of, tokens
    from peer import status  # of benchmarks/peers
    config = Cfg(layers=settings["layers"], d=settings["hidden"], heads=settings["heads"], T=settings["seq_len"])
    text = tokens()

    def micro_batch(index):
        return batch(text, index, 0, 1, settings["micro_batch"], config.T)

    if kind == "ds":
        step, module, bounds = deepspeed_pipeline(settings, make_layers(config), loss_of, micro_batch)
    else:
        step, module, bounds = torch_pipeline(kind, settings, make_layers(config), loss_of, micro_batch)
    seconds, losses = [], []
    for s in range(settings["warm"] + settings["steps"]):
        begin = time.perf_counter()
        losses.append(step(s))
        seconds.append(time.perf_counter() - begin)
    with open(f"{out}.{rank}", "w") as f:
        json.dump({"step_seconds": seconds[settings["warm"]:], "loss": losses, "peak_rss_bytes": status("VmHWM"),
                   "parameters": sum(p.numel() for p in module.parameters()), "bounds": bounds}, f)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

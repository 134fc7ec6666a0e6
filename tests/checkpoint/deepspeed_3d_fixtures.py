"""Writes the case pipe2_model2 of tests/checkpoint/deepspeed_fixtures with DeepSpeed's PipelineModule (0.19.8, torch
2.11, safetensors), on the CPU: 2 pipeline stages x 2 model-parallel ranks x 2 data-parallel ranks, ZeRO stage 1.

  python tests/checkpoint/deepspeed_3d_fixtures.py

The job trains the tiny net below for 3 steps and saves. saved/ is what DeepSpeed wrote; expected.safetensors has the
whole tensors as DeepSpeed's own API gives them on each rank, put together along the dimensions in CUTS, under the paths
of dsengine/checkpoint.h.
"""
import json
import os
import shutil

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402
import torch.multiprocessing  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_fixtures", "pipe2_model2")
PIPE, MODEL, DATA = 2, 2, 2
VOCABULARY, WIDTH, INNER, MICRO_BATCHES, STEPS = 11, 6, 8, 2, 3
# Dimensions along which model-parallel ranks have parts; the halves of layer 2 are fused in one weight.
CUTS = {"2.weight": 0, "2.bias": 0, "3.weight": 1}
INFO = {"universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r"tied_modules\.embed\.weight", r"1\..*", r"3\.bias"],
        "parameter_with_row_parallelism_patterns": [r"3\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r"2\.weight", r"2\.bias"]}

GROUP = None  # this rank's model-parallel group
MODEL_RANK = 0


class Spread(torch.autograd.Function):
    """The input of a layer that is cut by columns: its gradient is a sum over the ranks."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=GROUP)
        return gradient


class Joined(torch.autograd.Function):
    """The output of a layer that is cut by rows."""

    @staticmethod
    def forward(_, x):
        x = x.clone()
        torch.distributed.all_reduce(x, group=GROUP)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient


def values(n, *sizes):
    count = torch.Size(sizes).numel()
    return (0.5 * torch.sin(torch.arange(count, dtype=torch.float64) * (n + 1) + n)).reshape(sizes).float()


class Embed(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(values(0, VOCABULARY, WIDTH))

    def forward(self, tokens):
        return torch.nn.functional.embedding(tokens, self.weight)


class Norm(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(1 + values(1, WIDTH))
        self.register_buffer("calls", torch.tensor(7, dtype=torch.int64))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, (WIDTH, ), self.weight)


class Wide(torch.nn.Module):
    """Two fused halves, gate and value, each cut over the ranks."""

    def __init__(self):
        super().__init__()
        rows = INNER // MODEL
        weight, bias = values(2, 2, INNER, WIDTH), values(3, 2, INNER)
        own = slice(MODEL_RANK * rows, (MODEL_RANK + 1) * rows)
        self.weight = torch.nn.Parameter(weight[:, own].reshape(2 * rows, WIDTH).clone())
        self.bias = torch.nn.Parameter(bias[:, own].reshape(2 * rows).clone())

    def forward(self, x):
        gate, value = torch.nn.functional.linear(Spread.apply(x), self.weight, self.bias).chunk(2, dim=-1)
        return torch.sigmoid(gate) * value


class Narrow(torch.nn.Module):

    def __init__(self):
        super().__init__()
        rows = INNER // MODEL
        self.weight = torch.nn.Parameter(values(4, WIDTH, INNER)[:, MODEL_RANK * rows:(MODEL_RANK + 1) * rows].clone())
        self.bias = torch.nn.Parameter(values(5, WIDTH))

    def forward(self, x):
        return Joined.apply(torch.nn.functional.linear(x, self.weight)) + self.bias


def logits(embed, x):
    return torch.nn.functional.linear(x, embed.weight)


def loss_of(scores, tokens):
    return torch.nn.functional.cross_entropy(scores.reshape(-1, VOCABULARY), tokens.reshape(-1))


def batches(data_rank):
    number = data_rank
    while True:
        tokens = (torch.arange(10) * (3 + number) + torch.arange(10)**2).remainder(VOCABULARY).view(2, 5)
        yield tokens, (tokens * 5 + 2).remainder(VOCABULARY)
        number += DATA


def whole(name, parts):
    """parts: [model rank]."""
    dim = CUTS.get(name)
    if dim is None:
        assert all(torch.equal(parts[0], part) for part in parts), name
        return parts[0]
    if name.startswith("2."):
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[i] for i in range(2) for half in halves], dim=0)
    return torch.cat(parts, dim=dim)


def work(rank, port):
    global GROUP, MODEL_RANK
    ranks = PIPE * MODEL * DATA
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    topology = PipeModelDataParallelTopology(num_pp=PIPE, num_mp=MODEL, num_dp=DATA)
    for members in topology.get_axis_comm_lists("model"):
        group = torch.distributed.new_group(members)
        if rank in members:
            GROUP = group
    place = topology.get_coord(rank)
    MODEL_RANK = place.model
    layers = [TiedLayerSpec("embed", Embed), LayerSpec(Norm), LayerSpec(Wide), LayerSpec(Narrow), torch.tanh,
              TiedLayerSpec("embed", Embed, forward_fn=logits)]
    net = PipelineModule(layers=layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
              "zero_optimization": {"stage": 1}, "steps_per_print": 1000000,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-7,
                                                        "weight_decay": 0.1, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
                                      config=config)
    source = batches(place.data)
    for _ in range(STEPS):
        engine.train_batch(source)
    engine.save_checkpoint(FOLDER, "saved", client_state={"universal_checkpoint_info": INFO, "note": "own"},
                           save_latest=False)
    own = {}
    for name, parameter in net.named_parameters():
        own["weights/" + name] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            own[f"optimizer/{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    for name, buffer in net.named_buffers():
        own["buffers/" + name] = buffer.clone()
    gathered = [None] * ranks
    torch.distributed.all_gather_object(gathered, own)
    if rank == 0:
        tensors = {}
        for pipe in range(PIPE):
            of_stage = [gathered[topology.get_rank(pipe=pipe, model=m, data=0)] for m in range(MODEL)]
            for path in of_stage[0]:
                kind, name = path.rsplit("/", 1)
                path = f"{kind}/{name.removeprefix('tied_modules.')}"
                tensors.setdefault(path, whole(name, [part[f"{kind}/{name}"] for part in of_stage]).contiguous())
        save_file(tensors, os.path.join(FOLDER, "expected.safetensors"))
        os.chmod(os.path.join(FOLDER, "expected.safetensors"), 0o644)
        with open(os.path.join(FOLDER, "expected.json"), "w") as f:
            json.dump({"global_steps": engine.global_steps, "global_samples": engine.global_samples}, f)
            f.write("\n")
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's own scripts
            if os.path.exists(os.path.join(FOLDER, copied)):
                os.remove(os.path.join(FOLDER, copied))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.multiprocessing.spawn(work, (29650, ), nprocs=PIPE * MODEL * DATA)

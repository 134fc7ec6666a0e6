"""Writes tests/checkpoint/deepspeed_fixtures with DeepSpeed (0.19.8, torch 2.11, safetensors), on the CPU.

  python tests/checkpoint/deepspeed_fixtures.py [values] [case ...]

values/ is for the reader of torch.save's files. For each case a job of gloo ranks trains the tiny net below for 4
steps, saves a checkpoint and trains for 10 more. <case>/saved/ is what DeepSpeed wrote; <case>/expected.safetensors has
the whole tensors as DeepSpeed's own API gives them, under the paths of checkpoint/source/source.h; <case>/expected.json the
counters, and `loss`, the mean over the global batch before each of the 10 steps.

The batch of step s (from 0) is a formula: sequence i of 6 has the tokens (3 s + 5 i + t (t + i)) mod 11, t = 0..5, of
which the first five are read and the last five predicted. Rank r of W reads sequences [r 6/W, (r+1) 6/W).
"""
import argparse
import collections
import fractions
import json
import math
import os
import shutil
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_fixtures")
VOCABULARY, WIDTH, INNER, SEQUENCES, LENGTH = 11, 6, 13, 6, 5
BEFORE, AFTER = 4, 10


class Net(torch.nn.Module):
    """logits = out(tanh(inner(embed(tokens)) + shift)) embed^T + gain; tensor n begins as 0.5 sin((n + 1) i + n)"""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.shift = torch.nn.Parameter(torch.empty(1, INNER), requires_grad=False)  # frozen
        self.inner = torch.nn.Linear(WIDTH, INNER)
        self.out = torch.nn.Linear(INNER, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("gain", torch.empty(VOCABULARY))
        self.register_buffer("calls", torch.tensor(7, dtype=torch.int64))
        with torch.no_grad():
            values = list(self.named_parameters()) + [("gain", self.gain)]
            for n, (name, tensor) in enumerate(values):
                numbers = torch.arange(tensor.numel(), dtype=torch.float64)
                tensor.copy_((0.5 * torch.sin(numbers * (n + 1) + n)).reshape(tensor.shape))

    def forward(self, tokens):
        hidden = torch.tanh(self.inner(self.embed(tokens)) + self.shift)
        return self.head(self.out(hidden)) + self.gain


def batch(step, rank, ranks):
    share = SEQUENCES // ranks
    rows = [[(3 * step + 5 * i + t * (t + i)) % VOCABULARY for t in range(LENGTH + 1)]
            for i in range(rank * share, (rank + 1) * share)]
    tokens = torch.tensor(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def groups_of(net):
    """Matrices decay, vectors do not: two parameter groups."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.004}]


# name: ranks, stage, precision, parameter groups, further config
CASES = {
    "stage0_fp32": (2, 0, "fp32", True, {}),
    "stage0_bf16": (2, 0, "bf16", True, {}),
    "stage1_fp32": (2, 1, "fp32", True, {"scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"}}}),
    "stage0_plateau": (2, 0, "fp32", True, {"scheduler": {"type": "ReduceLROnPlateau", "params": {
        "factor": 0.5, "patience": 5, "threshold": 0.5}}}),  # of the loss of each step
    "stage1_bf16": (2, 1, "bf16", True, {"data_types": {"grad_accum_dtype": "fp32"}}),  # DeepSpeed's BF16_Optimizer
    "stage2_fp32": (3, 2, "fp32", True, {}),
    "stage2_bf16": (2, 2, "bf16", False, {}),
    "stage2_fp16": (2, 2, "fp16", True, {}),
    "stage3_fp32": (2, 3, "fp32", True, {}),
    "stage3_bf16": (2, 3, "bf16", False, {}),
}


def config_of(ranks, stage, precision, more):
    config = {
        "train_batch_size": SEQUENCES,
        "train_micro_batch_size_per_gpu": SEQUENCES // ranks,
        "zero_optimization": {"stage": stage, **({"sub_group_size": 100, "stage3_param_persistence_threshold": 0}
                                                 if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1,
                                                  "torch_adam": True}},
        "steps_per_print": 1000000,
        **more,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    return config


def step(engine, number, rank, ranks):
    tokens, targets = batch(number, rank, ranks)
    logits = engine(tokens)
    loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))
    engine.backward(loss)
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    follows = isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    engine.step(lr_kwargs={"metrics": mean.item() / ranks} if follows else None)
    return mean.item() / ranks


def expected_tensors(engine, case, save_dir):
    """By the paths of checkpoint/source/source.h."""
    _, stage, precision, _, more = CASES[case]
    net, tensors = engine.module, {}
    if stage in (1, 2) and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links states after the first update of the first group, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if stage == 0:
            if precision == "fp32":
                weight, state = parameter.detach(), engine.optimizer.state[parameter]
            else:
                found = [master for group, half in zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups)
                         for master, p in zip(group, half) if p is parameter]
                weight, state = found[0].detach(), engine.optimizer.optimizer.state[found[0]]
            tensors["weights/" + name] = weight.clone()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{key}/{name}"] = state[key].clone()
        else:
            tensors["weights/" + name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    for name, buffer in net.named_buffers():
        tensors["buffers/" + name] = buffer.clone()
    if stage == 3:
        with deepspeed.zero.GatheredParameters([net.shift]):
            tensors["weights/shift"] = net.shift.detach().clone()
    else:
        tensors["weights/shift"] = net.shift.detach().clone()
    if stage > 0 and "data_types" not in more and torch.distributed.get_rank() == 0:
        whole = get_fp32_state_dict_from_zero_checkpoint(save_dir, "saved")
        for path, tensor in tensors.items():
            name = path.split("/", 1)[1]
            if path.startswith("weights/") and name in whole:
                assert torch.equal(whole[name], tensor), (path, "zero_to_fp32 has other values")
    return tensors


def as_fused_adam(path):
    """Gives a file the form that DeepSpeed's FusedAdam, which needs a GPU, would have given it."""
    whole = torch.load(path, weights_only=False)
    state = whole["optimizer_state_dict"]["base_optimizer_state"]
    for parameter in state["state"].values():
        parameter["step"] = int(parameter["step"])
    state["param_groups"] = [{**{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")},
                              "bias_correction": True, "step": 0} for group in state["param_groups"]]
    torch.save(whole, path)


def work(rank, ranks, case, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    _, stage, precision, groups, more = CASES[case]
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch can; not every CPU is asked
    deepspeed.init_distributed("gloo")
    net = Net()
    parameters = groups_of(net) if groups else [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters,
                                      config=config_of(ranks, stage, precision, more))
    folder = os.path.join(FOLDER, case)
    for number in range(BEFORE):
        step(engine, number, rank, ranks)
    engine.save_checkpoint(folder, "saved", client_state={"note": "a program's own", "epochs": [1, 2.5, None, True]},
                           save_latest=False)
    torch.distributed.barrier()
    tensors = expected_tensors(engine, case, folder)
    counters = {
        "ranks": ranks, "stage": stage, "precision": precision, "global_steps": engine.global_steps,
        "global_samples": engine.global_samples, "skipped_steps": engine.skipped_steps,
        "groups": [{"lr": g["lr"], "weight_decay": g["weight_decay"], "beta1": g["betas"][0], "beta2": g["betas"][1],
                    "eps": g["eps"]} for g in engine.optimizer.param_groups],
        "loss_scale": engine.optimizer.cur_scale if precision == "fp16" else 1.0,
    }
    counters["loss"] = [step(engine, number, rank, ranks) for number in range(BEFORE, BEFORE + AFTER)]
    assert all(math.isfinite(loss) for loss in counters["loss"])
    if rank == 0:
        save_file({path: tensor.contiguous() for path, tensor in tensors.items()},
                  os.path.join(folder, "expected.safetensors"))
        with open(os.path.join(folder, "expected.json"), "w") as f:
            json.dump(counters, f, indent=1)
            f.write("\n")
        os.chmod(os.path.join(folder, "expected.safetensors"), 0o644)
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's own scripts
            if os.path.exists(os.path.join(folder, copied)):
                os.remove(os.path.join(folder, copied))
    if case == "stage2_bf16":
        as_fused_adam(os.path.join(folder, "saved", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def write_values():
    """values/: one file of torch.save with many types, its tensors once more, and one in the old format."""
    folder = os.path.join(FOLDER, "values")
    os.makedirs(folder, exist_ok=True)
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "float32": numbers, "transposed": numbers.t(), "column": numbers[:, 2], "tail": numbers.reshape(-1)[19:],
        "parameter": torch.nn.Parameter(numbers[1:3]), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "float64": torch.tensor([1e300, -0.0], dtype=torch.float64),
        "float16": torch.tensor([0.5, 65504.0], dtype=torch.float16),
        "bfloat16": torch.tensor([0.5, 3e38], dtype=torch.bfloat16), "int64": torch.tensor([-(1 << 62), 3]),
        "int32": torch.tensor([-5], dtype=torch.int32), "int16": torch.tensor([-6, 7], dtype=torch.int16),
        "int8": torch.tensor([-7, 1, 2], dtype=torch.int8), "uint8": torch.tensor([250], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
    }
    loop = [1]
    loop.append(loop)
    values = {
        "tensors": tensors, "complex": torch.tensor([1 + 2j]), "none": None, "true": True, "negative": -3,
        "large": 1 << 40, "huge": 1 << 100, "pi": 3.25, "infinite": math.inf, "text": "grün", "bytes": b"\x00\xff",
        "tuple": (1, (2, 3), []), "set": {5}, "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]), "numbered": {1: "one"}, "loop": loop,
        "namespace": argparse.Namespace(lr=0.5, names=["x"]), "fraction": fractions.Fraction(1, 3),
    }
    torch.save(values, os.path.join(folder, "values.pt"))
    torch.save([1, 2], os.path.join(folder, "old_format.pt"), _use_new_zipfile_serialization=False)
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()},
              os.path.join(folder, "expected.safetensors"))
    os.chmod(os.path.join(folder, "expected.safetensors"), 0o644)


def main():
    if len(sys.argv) == 1 or "values" in sys.argv:
        write_values()
    cases = [case for case in sys.argv[1:] if case != "values"] if len(sys.argv) > 1 else list(CASES)
    for number, case in enumerate(cases):
        shutil.rmtree(os.path.join(FOLDER, case), ignore_errors=True)
        ranks = CASES[case][0]
        torch.multiprocessing.spawn(work, (ranks, case, 29610 + number), nprocs=ranks)
        print(case, "written", flush=True)


if __name__ == "__main__":
    main()

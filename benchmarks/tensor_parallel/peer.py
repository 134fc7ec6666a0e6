"""One rank of the benchmark job in Python: torch's parallelize_module or DeepSpeed AutoTP, CPU, gloo. Started by compare.py.

  peer.py KIND SETTINGS OUT       KIND: torch, ds; SETTINGS: JSON of compare.py's; writes OUT.<rank> as JSON

The model of tests/parity/gpt.py with query, key and value apart, as both peers want them: the same numbers.
"""
import contextlib
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "tests", "parity"), os.path.join(HERE, "..", "peers")]
import torch
import torch.nn as nn
import torch.nn.functional as F
from gpt import Cfg, batch, build, tokens
from peer import status  # benchmarks/peers


class ApartAttention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        width = fused.proj.in_features
        self.head = fused.hd
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            layer = nn.Linear(width, width)
            with torch.no_grad():
                layer.weight.copy_(fused.qkv.weight[i * width:(i + 1) * width])
                layer.bias.copy_(fused.qkv.bias[i * width:(i + 1) * width])
            self.add_module(name, layer)
        self.o_proj = fused.proj

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.head).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def model_of(s):
    model = build(Cfg(layers=s["layers"], d=s["hidden"], heads=s["heads"], T=s["seq_len"]))
    for block in model.h:
        block.attn = ApartAttention(block.attn)
    return model


def torch_step(model, s):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"wte": RowwiseParallel(input_layouts=Replicate()),
                                         "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
        plan = {f"attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"attn.o_proj": RowwiseParallel(), "mlp.fc": ColwiseParallel(), "mlp.proj": RowwiseParallel()}
        for block in model.h:
            parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=0.01, foreach=False)

    def step(x, y):
        with loss_parallel() if world > 1 else contextlib.nullcontext():
            loss = F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return step


def deepspeed_step(model, s):
    import deepspeed
    deepspeed.init_distributed("gloo")
    rows = {"patterns": [r".*\.o_proj\.weight$", r".*\.mlp\.proj\.weight$"], "partition_type": "row"}
    columns = {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.fc\.weight$"], "partition_type": "column"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": s["micro_batch"], "gradient_clipping": 0.0, "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": s["lr"], "weight_decay": 0.01, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": int(os.environ["WORLD_SIZE"]),
                            "partition_config": {"use_default_specs": False, "layer_specs": [rows, columns]}}})

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss
    return step


def main():
    kind, s, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    model, text = model_of(s), tokens()
    step = (torch_step if kind == "torch" else deepspeed_step)(model, s)
    seconds, losses = [], []
    for i in range(s["warm"] + s["steps"]):
        begin = time.perf_counter()
        losses.append(step(*batch(text, i, 0, 1, s["micro_batch"], s["seq_len"])).item())  # the same on every rank
        seconds.append(time.perf_counter() - begin)
    with open(f"{out}.{rank}", "w") as f:
        json.dump({"step_seconds": seconds[s["warm"]:], "loss": losses, "peak_rss_bytes": status("VmHWM")}, f)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

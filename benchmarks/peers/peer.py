"""One rank of the benchmark job in Python: torch DDP, FSDP2 or DeepSpeed, CPU, gloo. Started by compare.py.

  peer.py KIND SIZE STEPS WARM LR OUT       KIND: ddp, fsdp2, ds0 to ds3, ds2offload, ds3offload; writes OUT.<rank> as JSON
"""
import json
import os
import sys
import time

STARTED = time.time()
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity"))
MICRO_BATCH = 4


def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))


def deepspeed_step(kind, model, lr):
    import deepspeed
    from compare import zero_section
    deepspeed.init_distributed("gloo")
    zero = zero_section(kind)
    if zero["stage"] in (1, 2):
        zero.update(reduce_bucket_size=50000000, allgather_bucket_size=50000000, overlap_comm=False)
    params = {"lr": lr, "weight_decay": 0.01}
    if not kind.endswith("offload"):  # there DeepSpeedCPUAdam
        params.update(torch_adam=True, fused=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_clipping": 1.0, "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero})

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss
    return step


def torch_step(net, lr):
    import torch
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01, fused=True)

    def step(x, y):
        loss = net(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step


def ddp_step(model, lr):
    import torch
    torch.distributed.init_process_group("gloo")
    return torch_step(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), lr)


def fsdp2_step(model, lr):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, lr)


def main():
    kind, size, steps, warm, lr, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6]
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from gpt import batch, build, cfg_of, tokens
    config, text = cfg_of(size), tokens()
    model = build(config)
    makers = {"ddp": ddp_step, "fsdp2": fsdp2_step}
    step = makers[kind](model, lr) if kind in makers else deepspeed_step(kind, model, lr)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds, losses, first = [], [], None
    for s in range(warm + steps):
        begin = time.perf_counter()
        losses.append(step(*batch(text, s, rank, world, MICRO_BATCH, config.T)).item())
        seconds.append(time.perf_counter() - begin)
        first = first or time.time()
    with open(f"{out}.{rank}", "w") as f:
        json.dump({"step_seconds": seconds[warm:], "loss": losses, "peak_rss_bytes": status("VmHWM"), "first_step_at": first}, f)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

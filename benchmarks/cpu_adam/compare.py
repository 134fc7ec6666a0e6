#!/usr/bin/env python3
"""AdamW on the CPU against DeepSpeedCPUAdam and torch.optim.AdamW, in turn on this machine.

    PYTHON benchmarks/cpu_adam/compare.py [--parameters 40000000] [--rounds 3] [--threads 1,2] [--build build/release]

PYTHON has torch and deepspeed (whose kernel it compiles at its first use, with ninja and g++). Two jobs are timed: the
update alone, from float32 gradients; and the whole optimizer step from scaled bfloat16 gradients: norm and overflow check,
unscaling and clipping, update, the new weights in bfloat16. In Python the step is what ZeRO-Offload does: gradients into
float32, norm, one multiplication by the combined factor, the optimizer, a copy of the weights.

The bandwidth that a virtual machine gets drifts, so every run of a peer stands between two runs of cpu_adam_bench, each in a
process of its own, and what counts is the ratio of its time to the mean of both: above 1, ours is faster.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PEERS = ["deepspeed", "fused", "foreach"]
LOSS_SCALE, CLIP, MEASURED = 1024.0, 1.0, 7


def make_optimizer(torch, peer, weights):
    options = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    if peer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        return DeepSpeedCPUAdam([weights], adamw_mode=True, **options)
    return torch.optim.AdamW([weights], fused=peer == "fused", foreach=peer == "foreach", **options)


def measure_peer(peer, options):
    """Prints {"update": ns per parameter, "step": ns per parameter}, medians, as the last line."""
    import torch
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(2)
    count = options.parameters
    weights = torch.nn.Parameter(torch.randn(count))
    gradient = torch.randn(count) * 0.01
    weights.grad = gradient
    optimizer = make_optimizer(torch, peer, weights)

    received, published = (gradient * LOSS_SCALE).bfloat16(), torch.zeros(count, dtype=torch.bfloat16)

    @torch.no_grad()
    def step():
        weights.grad.copy_(received)
        norm = torch.linalg.vector_norm(weights.grad).item() / LOSS_SCALE
        if norm in (float("inf"), float("-inf")) or norm != norm:
            sys.exit("the gradients overflow")
        weights.grad.mul_(min(1.0, CLIP / (norm + 1e-6)) / LOSS_SCALE)
        optimizer.step()
        published.copy_(weights)

    figures = {}
    for name, body in (("update", optimizer.step), ("step", step)):
        body()
        seconds = []
        for _ in range(MEASURED):
            begin = time.perf_counter()
            body()
            seconds.append(time.perf_counter() - begin)
        figures[name] = statistics.median(seconds) / count * 1e9
    print(json.dumps(figures))


def run(command, threads):
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), DS_ACCELERATOR="cpu")
    env.pop("LD_PRELOAD", None)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"cpu_adam: exit code {done.returncode} of {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_peer(peer, threads, options):
    return run([sys.executable, os.path.abspath(__file__), "--peer", peer, "--parameters", str(options.parameters)], threads)


def run_ours(threads, options):
    cases = run([os.path.join(options.build, "bin", "cpu_adam_bench"), "--json", "--only", "ours", "--parameters",
                 str(options.parameters), "--threads", str(threads), "--rounds", str(MEASURED)], threads)["cases"]
    return {"update": cases["ours update"], "step": cases["ours step bf16"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        return measure_peer(options.peer, options)

    run_peer("deepspeed", 1, argparse.Namespace(parameters=1 << 20))  # uncounted: compiles its kernel
    figures = []
    for threads in map(int, options.threads.split(",")):
        ours, peers = [run_ours(threads, options)], {peer: [] for peer in PEERS}
        for _ in range(options.rounds):
            for peer in PEERS:
                peers[peer].append((run_peer(peer, threads, options), len(ours)))
                ours.append(run_ours(threads, options))
        for job in ("update", "step"):
            time_of = [run[job]["ns_per_parameter"] for run in ours]
            paired = [value for run in ours for value in run[job]["paired"]]
            figures.append({"threads": threads, "job": job, "who": "ours", "ns_per_parameter": statistics.median(time_of),
                            "paired": statistics.median(paired)})
            for peer, runs in peers.items():
                ratios = [figure[job] / statistics.mean(time_of[place - 1:place + 1]) for figure, place in runs]
                figures.append({"threads": threads, "job": job, "who": peer,
                                "ns_per_parameter": statistics.median(figure[job] for figure, _ in runs),
                                "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)})

    print(f"AdamW, {options.parameters} parameters, {options.rounds} rounds; medians")
    print(f"{'threads':>7s} {'job':8s} {'':10s} {'ns/param':>9s}   time / ours (lowest, highest), or ours against its own traffic")
    for row in figures:
        line = f"{row['threads']:7d} {row['job']:8s} {row['who']:10s} {row['ns_per_parameter']:9.3f}   "
        if row["who"] == "ours":
            print(line + f"{row['paired']:.3f} of the speed of the memory")
        else:
            print(line + f"{row['ratio']:.3f} ({row['lowest']:.3f}, {row['highest']:.3f})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()

"""Seconds from typing the command to a trained step: ds-launch, torchrun with DDP, and the deepspeed launcher with ZeRO-2.

  scripts/compare_startup [--rounds 5] [--size tiny] [--ranks 2] [--json FILE] [--build build/release]

Each launches the same GPT on the same text for one step, ranks on this machine, CPU, gloo (dsengine: shared memory). "first
step" is the time from the start of the launcher to the end of the first step on the slower rank; dsengine's example does not
tell that moment, so its whole run stands for it, which is longer. "whole" ends when the launcher does. The cases run in turn,
once uncounted (page cache, DeepSpeed's compiled ops), then --rounds times; medians, and ratios to the peer in the same rounds.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "..", "peers")
sys.path.insert(0, PEERS)
from compare import ROOT, SIZES, free_port, optimizer_section, run, run_gpt, zero_section  # noqa: E402

# Case -> its peer.
CASES = {"ddp": None, "ds2": None, "ours0": "ddp", "ours2": "ds2"}
NAMES = {"ddp": "torchrun, DDP", "ds2": "deepspeed, ZeRO-2", "ours0": "ds-launch, stage 0", "ours2": "ds-launch, stage 2"}
LR = 1e-4


def launcher_of(case, ranks):
    port = str(free_port())
    if case == "ddp":
        return [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--nnodes=1", f"--nproc_per_node={ranks}",
                "--master_addr=127.0.0.1", f"--master_port={port}"]
    return [sys.executable, os.path.join(os.path.dirname(sys.executable), "deepspeed"), "--num_accelerators", str(ranks),
            "--master_port", port, "--no_local_rank"]


def run_peer(case, a, folder):
    out = os.path.join(folder, "peer")
    begin = time.time()
    run([*launcher_of(case, a.ranks), os.path.join(PEERS, "peer.py"), case, a.size, "1", "0", str(LR), out],
        os.path.join(folder, case + ".log"))
    whole = time.time() - begin
    ranks = [json.load(open(f"{out}.{r}")) for r in range(a.ranks)]
    return {"first_step": max(r["first_step_at"] for r in ranks) - begin, "whole": whole,
            "loss": statistics.mean(r["loss"][0] for r in ranks)}


def run_ours(case, a, folder):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": optimizer_section(LR),
              "zero_optimization": zero_section(case)}
    shape = [word for key, value in SIZES[a.size].items() for word in (f"--{key}", str(value))]
    begin = time.time()
    rows, _ = run_gpt(a.build, a.ranks, config, [*shape, "--steps", "1"], folder, case)
    whole = time.time() - begin
    return {"first_step": whole, "whole": whole, "loss": rows[0]["loss"]}


def run_case(case, a, folder):
    return (run_ours if case.startswith("ours") else run_peer)(case, a, folder)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--size", choices=SIZES, default="tiny")
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--json", help="also write the figures to this file")
    a = p.parse_args()
    a.build = os.path.abspath(a.build)
    runs = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            run_case(case, a, folder)
        for _ in range(a.rounds):
            for case in CASES:
                runs[case].append(run_case(case, a, folder))
    losses = {case: runs[case][0]["loss"] for case in CASES}
    figures = {"ranks": a.ranks, "size": a.size, "rounds": a.rounds, "cases": {}}
    for case, peer in CASES.items():
        own = {key: statistics.median(r[key] for r in runs[case]) for key in ("first_step", "whole")}
        own["first_step_all"] = [r["first_step"] for r in runs[case]]
        if peer:
            own["peer"] = peer
            own["peer_first_step_ratio"] = figures["cases"][peer]["first_step"] / own["first_step"]
            own["peer_whole_ratio"] = figures["cases"][peer]["whole"] / own["whole"]
        figures["cases"][case] = own
    print(f"one step of the {a.size} GPT, {a.ranks} ranks x 1 thread, medians of {a.rounds} rounds; seconds, and the peer's over ours")
    print(f"{'':20s} {'first step':>10s} {'whole':>8s}   peer's first step / whole")
    for case, own in figures["cases"].items():
        ratios = f"   {own['peer_first_step_ratio']:.2f} x / {own['peer_whole_ratio']:.2f} x" if "peer" in own else ""
        print(f"{NAMES[case]:20s} {own['first_step']:10.2f} {own['whole']:8.2f}{ratios}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(figures, f, indent=1)
    wrong = [case for case in CASES if abs(losses[case] - losses["ddp"]) > 1e-4]
    if wrong:
        sys.exit(f"the first losses of {wrong} differ from DDP's by more than 1e-4: {losses}; these figures compare different work")


if __name__ == "__main__":
    main()

"""A GPT whose layers are split over ranks: dsengine against torch's DTensor and DeepSpeed AutoTP, in turn on this machine.

  PYTHON benchmarks/tensor_parallel/compare.py [--rounds 3] [--steps 10] [--ranks 2] [--layers 4] [--hidden 256]
                                               [--only ours-1,ours-2,torch-2] [--build build/release] [--json FILE]

PYTHON is an interpreter with torch 2.11 and what it needs, as scripts/install_peers prints one; where it has DeepSpeed 0.19.8, its
AutoTP is a case. The same start values, batches (4 sequences of 128 tokens, the same on all ranks) and AdamW without clipping,
float32; every rank is one thread, on a core of its own where there is one. A case is WHO-RANKS: ours (the engine, from
"tensor_parallel": {"autotp_size": RANKS} alone; ours-N-gloo has torch's transport in place of dsengine's own choice, ours-N-zeroS
ZeRO stage S beside the axis, with --stages), torch (parallelize_module, loss_parallel) or ds.

--data D gives dsengine's cases of several ranks D replicas of the axis, so that D x RANKS ranks share the cores and stages have
something to shard. The 4 sequences are each replica's own: it goes with --stages, whose cases compare with each other alone.

Every round launches each case once. Step time: the median over the steps of all rounds, apart from the first three of each run,
beside it the fastest. Ratios are medians over rounds of medians of the same round, with the least and the largest: "against one
rank" is ours-1 / case, "peer / ours" is above 1 where ours is faster. Losses are compared: where a case's differ from ours-1's by
more than 1e-4 the exit code is 1, for the figures then compare different work.
"""
import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "peers"))
from compare import ROOT, optimizer_section, run_gpt, run_python

WARM = 3
SEQ_LEN = 128


def cases_of(ranks, stages):
    if stages:
        return [f"ours-{ranks}"] + [f"ours-{ranks}-zero{stage}" for stage in (1, 2, 3)]
    cases = ["ours-1", f"ours-{ranks}", f"ours-{ranks}-gloo", "torch-1", f"torch-{ranks}"]
    return cases + ([f"ds-{ranks}"] if importlib.util.find_spec("deepspeed") else [])


def ranks_of(case):
    return int(case.split("-")[1])


def run_ours(case, s, folder, build):
    ranks = ranks_of(case)
    config = {"train_micro_batch_size_per_gpu": s["micro_batch"], "gradient_clipping": 0, "optimizer": optimizer_section(s["lr"]),
              "tensor_parallel": {"autotp_size": ranks}, "communication_backend": "gloo" if case.endswith("-gloo") else "auto"}
    if "-zero" in case:
        config["zero_optimization"] = {"stage": int(case[-1])}
    flags = [f"--{key}={s[key]}" for key in ("layers", "hidden", "heads", "seq_len")] + [f"--steps={s['steps'] + WARM}"]
    world = ranks * (s["data"] if ranks > 1 else 1)
    binding = ["--bind_core_list", "0"] if ranks == 1 else ["--bind_cores_to_rank"] if world <= os.cpu_count() else []
    rows, summary = run_gpt(build, world, config, flags, folder, case, binding)
    return {"step_seconds": [r["step_seconds"] for r in rows[WARM:]], "loss": [r["loss"] for r in rows],
            "peak": max(summary["peak_rss_bytes"])}


def run_peer(case, s, folder):
    ranks = run_python(os.path.join(HERE, "peer.py"), ranks_of(case), [case.split("-")[0], json.dumps(dict(s, warm=WARM))],
                       folder, case)
    return {"step_seconds": ranks[0]["step_seconds"], "loss": ranks[0]["loss"], "peak": max(r["peak_rss_bytes"] for r in ranks)}


def run_case(case, s, folder, build):
    return run_ours(case, s, folder, build) if case.startswith("ours") else run_peer(case, s, folder)


def ratio(above, below):
    """Of the runs of two cases, round by round: the median with its bounds."""
    values = [statistics.median(a["step_seconds"]) / statistics.median(b["step_seconds"]) for a, b in zip(above, below)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_table(runs):
    first = "against one rank" if any(case.endswith("-1") for case in runs) else f"against {next(iter(runs))}"
    print(f"{'case':14s} {'ms/step':>8s} {'fastest':>8s} {'MiB':>6s}   {first:22s} peer / ours")
    for case, own in runs.items():
        seconds = [s for r in own for s in r["step_seconds"]]
        alone = runs.get("ours-1" if case.startswith("ours") else "torch-1", runs[next(iter(runs))])
        line = (f"{case:14s} {1e3 * statistics.median(seconds):8.1f} {1e3 * min(seconds):8.1f} "
                f"{statistics.median(r['peak'] for r in own) / 2**20:6.0f}   {ratio(alone, own) if alone else '':22s}")
        same = runs.get(f"ours-{ranks_of(case)}")
        print(line + (f" {ratio(own, same)}" if same and not case.startswith("ours") else ""))


def different(runs):
    """Cases whose losses are others, in words."""
    first = next(iter(runs))
    wrong = []
    for case, own in runs.items():
        apart = max(abs(x - y) for r in own for x, y in zip(r["loss"], runs[first][0]["loss"]))
        if not apart < 1e-4:
            wrong.append(f"the losses of {case} differ from those of {first} by {apart}")
    return wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden", type=int, default=256, help="a multiple of 64, the width of a head")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--stages", action="store_true", help="ZeRO stages 1 to 3 beside stage 0 of dsengine's own, and nothing else")
    p.add_argument("--data", type=int, default=1, help="replicas of the axis, of dsengine's cases")
    p.add_argument("--only", help="cases, comma separated")
    p.add_argument("--json", help="also write the runs to this file")
    a = p.parse_args()
    cases = [c for c in cases_of(a.ranks, a.stages) if not a.only or c in a.only.split(",")]
    if not cases:
        p.error(f"--only {a.only} chooses none of {', '.join(cases_of(a.ranks, a.stages))}")
    if a.data != 1 and not a.stages:
        p.error(f"expected --stages beside --data {a.data}: cases of one rank and the peers have one replica")
    if a.hidden % 64:
        p.error(f"expected --hidden a multiple of 64, found {a.hidden}")
    settings = {"layers": a.layers, "hidden": a.hidden, "heads": a.hidden // 64, "seq_len": SEQ_LEN, "micro_batch": 4, "lr": a.lr,
                "steps": a.steps, "data": a.data}
    runs = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:  # uncounted: page cache
            run_case(case, dict(settings, steps=1), folder, os.path.abspath(a.build))
        for _ in range(a.rounds):
            for case in cases:
                runs[case].append(run_case(case, settings, folder, os.path.abspath(a.build)))
    print(f"GPT of {a.layers} layers x {a.hidden}, 4 x {SEQ_LEN} tokens, 1 thread a rank, {a.rounds} rounds of {a.steps} steps")
    print_table(runs)
    if "ds-" not in "".join(cases) and not a.only and not a.stages:
        print(f"  without DeepSpeed AutoTP: {sys.executable} does not have it (scripts/install_peers)")
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"settings": settings, "runs": runs}, f, indent=1)
            f.write("\n")
    wrong = different(runs)
    if wrong:
        sys.exit("these figures compare different work: " + "; ".join(wrong))


if __name__ == "__main__":
    main()

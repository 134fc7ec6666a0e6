"""A GPT in pipeline stages: dsengine against DeepSpeed and torch.distributed.pipelining, in turn on this machine.

  scripts/compare_pipelines [--rounds 2] [--steps 8] [--ranks 2] [--layers 8] [--hidden 256] [--micro_batches 8]
                            [--only 1f1b,torch-zbv] [--build build/release]

The same model, start values, micro-batches (4 sequences of 128) and AdamW, float32, gloo; every rank is one thread on a core of
its own. A case is ours-SCHEDULE, ds-SCHEDULE or torch-SCHEDULE; ours-1f1b-shm takes dsengine's own choice between ranks of one
host in place of gloo; ours-single, ours-data and ours-tensor are the same work without a pipeline, on one rank, data parallel and
with layers split over the ranks, and ours-1f1b-tensor2 is a pipeline of half the ranks, each stage with its layers split over two.
--only names cases or schedules.

Every round launches each case once. Step time: the median over the steps of all rounds, apart from the first two of each run;
beside it the fastest of them, which other programs disturb less. "others" is the share of the machine's CPU time that other
programs took during the runs: above a few percent, times are worth little. Memory: the median over rounds of the fullest rank's
peak resident bytes; "added" is what it has beyond a run of a tiny model, so without program, libraries and interpreter. Ratios:
the median over rounds of peer / ours, same schedule, same round, and between which values the rounds lie: above 1, ours is
faster or smaller. A case of ours beside another one shows the first case / this one. Exit code 1 where losses of two cases are
more than 1e-4 apart at any step, or where a peer's ranks have other numbers of parameters than ours of the same schedule.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "peers"))
from compare import ROOT, optimizer_section, run_gpt, run_python

CASES = ["ours-1f1b", "ds-1f1b", "torch-1f1b", "ours-1f1b-shm", "ours-gpipe", "torch-gpipe", "ours-zb_h1", "torch-zb_h1",
         "ours-interleaved", "torch-interleaved", "ours-zbv", "torch-zbv", "ours-single", "ours-data"]
# Run when --only names them.
MORE = ["ours-dualpipev", "torch-dualpipev", "ours-zb_h2", "ours-data-shm", "ours-tensor-shm", "ours-1f1b-tensor2-shm"]
WITHOUT_STAGES = ("single", "data", "tensor")
WARM = 2
# Float32 parameter, gradient and AdamW's two moments.
STATE_BYTES = 16


def run_peer(case, s, folder):
    who, schedule = case.split("-", 1)
    ranks = run_python(os.path.join(HERE, "peer.py"), s["ranks"], ["ds" if who == "ds" else schedule, json.dumps(s)], folder, case)
    losses = next(r["loss"] for r in ranks if None not in r["loss"])
    return {"step_seconds": ranks[0]["step_seconds"], "peak": max(r["peak_rss_bytes"] for r in ranks), "loss": losses,
            "parameters": [r["parameters"] for r in ranks], "bounds": ranks[0]["bounds"]}


def run_ours(case, s, folder, build):
    schedule = case.split("-")[1]
    ranks = 1 if schedule == "single" else s["ranks"]
    config = {"train_micro_batch_size_per_gpu": s["micro_batch"], "gradient_clipping": 0, "optimizer": optimizer_section(s["lr"]),
              "gradient_accumulation_steps": s["micro_batches"] // (ranks if schedule == "data" else 1),
              "communication_backend": "auto" if case.endswith("-shm") else "gloo"}
    tensor = ranks if schedule == "tensor" else 2 if "-tensor2" in case else 1  # ranks of the tensor axis
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
    flags = [f"--{key}={s[key]}" for key in ("layers", "hidden", "heads", "seq_len")] + [f"--steps={s['steps'] + s['warm']}"]
    if schedule not in WITHOUT_STAGES:
        flags += [f"--pipeline_stages={ranks // tensor}", f"--pipeline_schedule={schedule}"]
    binding = ["--bind_core_list", "0"] if ranks == 1 else ["--bind_cores_to_rank"] if ranks <= os.cpu_count() else []
    rows, summary = run_gpt(build, ranks, config, flags, folder, case, binding)
    return {"step_seconds": [r["step_seconds"] for r in rows[s["warm"]:]], "peak": max(summary["peak_rss_bytes"]),
            "loss": [r["loss"] for r in rows], "parameters": [b / STATE_BYTES for b in summary["model_state_bytes"]]}


def cpu_seconds():
    """Of all CPUs so far: all there were, those used by any program, those used by this one's children."""
    with open("/proc/stat") as f:
        ticks = [int(word) for word in f.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    hertz = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / hertz, (sum(ticks) - ticks[3] - ticks[4]) / hertz, children.ru_utime + children.ru_stime


def run_case(case, settings, folder, build):
    before = cpu_seconds()
    run = run_ours(case, settings, folder, build) if case.startswith("ours") else run_peer(case, settings, folder)
    there, used, own = (after - b for after, b in zip(cpu_seconds(), before))
    return dict(run, others=max(0.0, used - own) / there)


def is_chosen(case, only):
    return case in CASES if not only else any(case == o or case.split("-", 1)[1] == o for o in only.split(","))


def spread(values):
    return f"{statistics.median(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")


def ratios(peer, ours, tiny):
    """Of step time, peak memory, added memory: peer / ours, by round."""
    rounds = list(zip(peer["runs"], ours["runs"]))
    return (spread([statistics.median(p["step_seconds"]) / statistics.median(o["step_seconds"]) for p, o in rounds]),
            spread([p["peak"] / o["peak"] for p, o in rounds]),
            spread([(p["peak"] - tiny[0]) / (o["peak"] - tiny[1]) for p, o in rounds]))


def summarize(runs, tiny):
    peak = statistics.median(r["peak"] for r in runs)
    seconds = [s for r in runs for s in r["step_seconds"]]
    return {"step_seconds": statistics.median(seconds), "fastest": min(seconds), "peak_mib": peak / 2**20,
            "added_mib": (peak - tiny) / 2**20, "others": statistics.median(r["others"] for r in runs),
            "parameters": runs[0]["parameters"], "bounds": runs[0].get("bounds"),
            "loss": [runs[0]["loss"][0], runs[0]["loss"][-1]], "runs": runs}


def print_table(figures, settings, tiny):
    tokens = settings["micro_batches"] * settings["micro_batch"] * settings["seq_len"]
    first = next(iter(figures))
    print(f"{'case':22s} {'s/step':>7s} {'fastest':>8s} {'tokens/s':>9s} {'others':>6s} {'MiB':>6s} {'added':>6s}   "
          f"peer / ours: {'step time':24s} {'memory':24s} memory added")
    for case, f in figures.items():
        line = (f"{case:22s} {f['step_seconds']:7.3f} {f['fastest']:8.3f} {tokens / f['step_seconds']:9.0f} {f['others']:6.0%} "
                f"{f['peak_mib']:6.0f} {f['added_mib']:6.0f}")
        ours = "ours-" + case.split("-", 1)[1]
        if ours != case and ours in figures:
            line += "                {:24s} {:24s} {}".format(*ratios(f, figures[ours], (tiny[case], tiny[ours])))
        elif ours == case and case != first:
            line += "   first / this: {:24s} {:24s} {}".format(*ratios(figures[first], f, (tiny[first], tiny[case])))
        print(line)


def check(figures):
    """What makes the figures worthless, in words."""
    first, wrong = next(iter(figures)), []
    for case, f in figures.items():
        apart = max(abs(x - y) for r in f["runs"] for x, y in zip(r["loss"], figures[first]["runs"][0]["loss"]))
        print(f"  {case:18s} loss {f['loss'][0]:.5f} to {f['loss'][1]:.5f}, at most {apart:.1e} from {first}'s; parameters a rank "
              f"{', '.join(f'{n:.0f}' for n in f['parameters'])}" + (f"; stages begin at layers {f['bounds'][:-1]}" if f["bounds"] else ""))
        if not apart < 1e-4:
            wrong.append(f"the losses of {case} differ from those of {first} by {apart}")
        ours = figures.get("ours-" + case.split("-", 1)[1], f)
        if f["parameters"] != ours["parameters"]:
            wrong.append(f"the stages of {case} are cut in another way than ours")
    return wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--layers", type=int, default=8, help="a multiple of twice the ranks")
    p.add_argument("--hidden", type=int, default=256, help="a multiple of 64, the width of a head")
    p.add_argument("--micro_batches", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--only", help=f"cases or schedules, comma separated; besides the default cases {','.join(MORE)}")
    p.add_argument("--json", help="also write the figures to this file")
    a = p.parse_args()
    cases = [case for case in CASES + MORE if is_chosen(case, a.only)]
    if not cases:
        p.error(f"--only {a.only} chooses none of {', '.join(CASES + MORE)}")
    if a.layers % (2 * a.ranks) or a.hidden % 64 or a.micro_batches % a.ranks:
        p.error("expected --layers a multiple of twice the ranks, --hidden of 64, --micro_batches of the ranks; "
                f"found {a.layers}, {a.hidden}, {a.micro_batches} and {a.ranks} ranks")
    settings = {"ranks": a.ranks, "layers": a.layers, "hidden": a.hidden, "heads": a.hidden // 64, "seq_len": 128, "micro_batch": 4,
                "micro_batches": a.micro_batches, "steps": a.steps, "warm": WARM, "lr": a.lr}
    tiny_model = dict(settings, layers=2 * a.ranks, hidden=64, heads=1, seq_len=16, steps=0)
    build = os.path.abspath(a.build)
    runs, tiny = {case: [] for case in cases}, {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:  # also fills the page cache
            tiny[case] = run_case(case, tiny_model, folder, build)["peak"]
        for _ in range(a.rounds):
            for case in cases:
                runs[case].append(run_case(case, settings, folder, build))
    figures = {case: summarize(runs[case], tiny[case]) for case in cases}
    print(f"GPT of {a.layers} layers x {a.hidden}, {a.ranks} ranks x 1 thread, {a.micro_batches} micro-batches of 4 x 128 tokens, "
          f"{a.rounds} rounds of {a.steps} steps")
    print_table(figures, settings, tiny)
    wrong = check(figures)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(figures, f, indent=1)
    if wrong:
        sys.exit("these figures compare different work: " + "; ".join(wrong))


if __name__ == "__main__":
    main()

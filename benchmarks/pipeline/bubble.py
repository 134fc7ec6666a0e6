#!/usr/bin/env python3
"""The bubble of each pipeline schedule as it runs, beside the one of its plan.

  benchmarks/pipeline/bubble.py [--stages 4] [--micro_batches 8] [--kinds gpipe,1f1b] [--times 12,12,12] [--rounds 3]

Runs sleeping_stages: one process a stage, with layers that sleep in place of computing, so that two cores run four stages at
once. Every rank has two layers; --times are the milliseconds of one for forward, backward of the input and backward of the
weights. Of the last step's trace `ds-tool schedule --measured` says the bubble, 1 - work / longest span of a rank, and the one
of the plan with the median times that were measured for each stage, where messages take none; `asked` is the plan with the
times that were asked for. Medians over the rounds, in percent; the kinds run in turns. Exit code 1 when a measured bubble is
more than --limit points from its plan.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "peers"))
from compare import ROOT, free_port  # noqa: E402

KINDS = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev"]
LAYERS_PER_RANK = 2


def output_of(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    if done.returncode:
        sys.exit(f"failed with exit code {done.returncode}: {' '.join(command)}\n{(done.stdout + done.stderr)[:3000]}")
    return done.stdout


def examine(a, kind, *more):
    return json.loads(output_of([os.path.join(a.build, "bin", "ds-tool"), "schedule", "--kind", kind, "--stages", str(a.stages),
                                 "--micro_batches", str(a.micro_batches), "--json", *more]))


def measure(a, kind, folder):
    trace = os.path.join(folder, f"{kind}.json")
    forward, backward_input, backward_weight = a.times.split(",")
    output_of([os.path.join(a.build, "bin", "ds-launch"), "--num_procs", str(a.stages), "-q", "--master_port", str(free_port()),
               os.path.join(a.build, "bin", "sleeping_stages"), "--schedule", kind, "--micro_batches", str(a.micro_batches),
               "--layers", str(LAYERS_PER_RANK * a.stages), "--forward", forward, "--backward_input", backward_input,
               "--backward_weight", backward_weight, "--trace", trace])
    return examine(a, kind, "--measured", trace)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stages", type=int, default=4)
    p.add_argument("--micro_batches", type=int, default=8)
    p.add_argument("--kinds", default=",".join(KINDS), help="comma separated")
    p.add_argument("--times", default="12,12,12", help="milliseconds of a layer: forward, backward of input, of weights")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--limit", type=float, default=5, help="points between measured and planned bubble")
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--json", help="also write the figures to this file")
    a = p.parse_args()
    kinds = a.kinds.split(",")
    runs = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for kind in kinds:
                runs[kind].append(measure(a, kind, folder))
    print(f"{a.stages} stages, {a.micro_batches} micro-batches, layers that sleep {a.times} ms, {LAYERS_PER_RANK} a rank, "
          f"{a.rounds} rounds; bubble in %")
    print(f"{'schedule':12s} {'asked':>7s} {'planned':>8s} {'measured':>9s} {'difference':>11s}   "
          "measured in each round      step ms: planned, measured")
    figures, beyond = {}, []
    for kind in kinds:
        planned, measured = ([100 * run[which]["bubble"] for run in runs[kind]] for which in ("planned", "measured"))
        step = {which: statistics.median(run[which]["makespan"] for run in runs[kind]) / 1000 for which in ("planned", "measured")}
        difference = statistics.median(m - p for m, p in zip(measured, planned))
        figures[kind] = {"asked": 100 * examine(a, kind, "--times", a.times)["planned"]["bubble"],
                         "planned": statistics.median(planned), "measured": statistics.median(measured),
                         "difference": difference, "measured_rounds": measured, "step_ms": step}
        f = figures[kind]
        print(f"{kind:12s} {f['asked']:7.1f} {f['planned']:8.1f} {f['measured']:9.1f} {difference:+11.1f}   "
              f"{' '.join(f'{m:5.1f}' for m in measured):27s} {step['planned']:8.0f} {step['measured']:8.0f}")
        if abs(difference) > a.limit:
            beyond.append(kind)
    if a.json:
        with open(a.json, "w") as file:
            json.dump(figures, file, indent=1)
    if beyond:
        sys.exit(f"more than {a.limit} points from the plan: {', '.join(beyond)}")


if __name__ == "__main__":
    main()

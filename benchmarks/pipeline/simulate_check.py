#!/usr/bin/env python3
"""What `ds-tool simulate` predicts, against real runs: the example's GPT as a pipeline of a few ranks, or layers that sleep.

    benchmarks/pipeline/simulate_check.py [--ranks 2] [--schedules gpipe,1f1b,...] [--micro_batches 4,8] [--repeats 3]
    benchmarks/pipeline/simulate_check.py --sleep 12,12,12 --ranks 4

The first run of a schedule tells the times of a stage for a micro-batch, of a message and of the update. With them
`ds-tool simulate` predicts, for every schedule and number of micro-batches, the time of a step, the share of time in which
ranks do not compute, and, from the model's formulas alone, what ranks send and keep. Each is printed beside what runs
measured: the median step, and the trace of the last one.
    own         with the stage times of that very run: is the order of actions the one that was predicted?
    calibrated  with those of the first run: is it a prediction?
Ranks need a core each, and nothing else may run.

With --sleep, sleeping_stages runs: two layers a rank that take these milliseconds for forward, backward of the input and of
the weights without computing, so that ranks need no cores. What is predicted follows from these numbers alone.

Exit code 1 when a step that was predicted so (calibrated, or asleep) is off by more than --limit.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "peers"))
from compare import ROOT, free_port  # noqa: E402

ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")
CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
LAYERS_PER_RANK = 2  # of those that sleep


def execute(command, name):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"simulate_check: {name} ended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def read_trace(path):
    """Returns each rank's compute actions, in order, as (stage, kind, micro-batch, start, end) in seconds."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    ranks = {}
    for event in events if isinstance(events, list) else events["traceEvents"]:
        action = ACTION.match(event["name"])
        if event.get("ph") == "X" and action:
            start = event["ts"] * 1e-6
            ranks.setdefault(event["tid"], []).append(
                (int(action[1]), action[2], int(action[3]), start, start + event["dur"] * 1e-6))
    return {rank: sorted(actions, key=lambda a: a[3]) for rank, actions in ranks.items()}


def median(values, otherwise=0.0):
    return statistics.median(values) if values else otherwise


def stage_times(traces):
    """Medians of (forward, backward of the input, of the weights) for each stage. Of a whole backward, a half each."""
    samples = {}
    for trace in traces:
        for actions in trace.values():
            for stage, kind, _, start, end in actions:
                samples.setdefault(stage, {}).setdefault(kind, []).append(end - start)
    times = []
    for stage in sorted(samples):
        kinds = samples[stage]
        half = median(kinds.get("B", [])) / 2
        times.append((median(kinds["F"]), median(kinds.get("I", []), half), median(kinds.get("W", []), half)))
    return times


def message_seconds(traces, stages):
    """From the end of an action to the start of the one on another rank that waits for it."""
    waits = []
    for trace in traces:
        ends = {}
        for rank, actions in trace.items():
            for stage, kind, micro_batch, _, end in actions:
                ends[(stage, "F" if kind == "F" else kind, micro_batch)] = (end, rank)
        for rank, actions in trace.items():
            before = float("inf")
            for stage, kind, micro_batch, start, end in actions:
                sources = [(stage - 1, "F")] if kind == "F" else [(stage + 1, "B"), (stage + 1, "I")]
                made = [ends[(s, k, micro_batch)] for s, k in sources if (s, k, micro_batch) in ends]
                if kind != "W" and 0 <= sources[0][0] < stages and made and made[0][1] != rank and before < made[0][0]:
                    waits.append(start - made[0][0])
                before = end
    return max(0.0, median(waits))


def span_and_idle(trace):
    first = min(actions[0][3] for actions in trace.values())
    last = max(actions[-1][4] for actions in trace.values())
    busy = sum(end - start for actions in trace.values() for _, _, _, start, end in actions)
    return last - first, 1 - busy / ((last - first) * len(trace))


def launch(program, flags, options):
    execute([os.path.join(options.build, "bin/ds-launch"), "--num_procs", str(options.ranks), "-q", "--master_port",
             str(free_port()), os.path.join(options.build, "bin", program), *flags], f"{program} {' '.join(flags)}")


def write_config(folder, schedule, micro_batches, options):
    config = {"train_micro_batch_size_per_gpu": options.micro_batch_size,
              "gradient_accumulation_steps": micro_batches,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
              "zero_optimization": {"stage": options.stage},
              "pipeline": {"stages": options.pipeline, "schedule": schedule}}
    path = os.path.join(folder, "ds_config.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    return path


def model_flags(options):
    flags = []
    for name in ("layers", "hidden", "heads", "seq_len", "vocab"):
        flags += [f"--{name}", str(getattr(options, name))]
    return flags


def train(folder, schedule, micro_batches, options):
    """Returns what was measured, times in seconds."""
    config = write_config(folder, schedule, micro_batches, options)
    steps, summaries, traces = [], [], []
    for _ in range(options.repeats):
        metrics, trace = os.path.join(folder, "metrics.json"), os.path.join(folder, "trace.json")
        if os.path.exists(metrics):
            os.remove(metrics)
        launch("gpt", ["--deepspeed_config", config, "--pipeline_stages", str(options.pipeline), "--steps",
                       str(options.steps), "--generate", "0", "--metrics", metrics, "--pipeline_trace", trace,
                       *model_flags(options)], options)
        with open(metrics, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        steps += [line["step_seconds"] for line in lines if "loss" in line][1:]  # the first one allocates
        summaries += [line["summary"] for line in lines if "summary" in line]
        traces.append(read_trace(trace))
    spans = [span_and_idle(trace) for trace in traces]
    return {"step": median(steps), "span": median([span for span, _ in spans]),
            "idle": median([idle for _, idle in spans]), "times": stage_times(traces),
            "message": message_seconds(traces, options.pipeline * CHUNKS.get(schedule, 1)),
            "sent": max(summaries[0]["comm_bytes_sent"]) / options.steps,
            "state": max(summaries[0]["model_state_bytes"])}


def simulate(config, model, times, message, update, options):
    flags = []
    for name, index in (("forward", 0), ("backward_input", 1), ("backward_weight", 2)):
        flags += [f"--{name}_ms", ",".join(f"{time[index] * 1e3:.6f}" for time in times)]
    return json.loads(execute(
        [os.path.join(options.build, "bin/ds-tool"), "simulate", config, "--ranks", str(options.ranks), "--node_gbps",
         "100", *model, *flags, "--message_ms", f"{message * 1e3:.6f}", "--update_ms", f"{update * 1e3:.6f}", "--per_rank",
         "--json"], "ds-tool simulate"))


def calibrated_times(base, schedule):
    """Of schedules with several stages a rank: the layers of a rank's single stage, divided evenly."""
    chunks = CHUNKS.get(schedule, 1)
    if chunks == 1:
        return base
    mean = [sum(time[k] for time in base) / len(base) / chunks for k in range(3)]
    return [tuple(mean)] * (len(base) * chunks)


def off(predicted, measured):
    return f"{(predicted / measured - 1) * 100:+6.1f} %"


def check_training(folder, options):
    """Returns the largest error of a calibrated step."""
    worst = 0
    base = None
    print(f"{'schedule':12} {'m':>3}  {'step':>9}  {'own':>8}  {'calibrated':>10}  {'idle':>6}  {'own':>6}  "
          f"{'calibrated':>10}  {'sent':>8}  {'state':>8}")
    for schedule in options.schedules.split(","):
        for micro_batches in map(int, options.micro_batches.split(",")):
            found = train(folder, schedule, micro_batches, options)
            config = write_config(folder, schedule, micro_batches, options)
            if base is None:
                base = {**found, "update": max(0.0, found["step"] - found["span"])}
            own = simulate(config, model_flags(options), found["times"], found["message"], base["update"], options)
            ahead = simulate(config, model_flags(options), calibrated_times(base["times"], schedule), base["message"],
                             base["update"], options)
            sent = max(sum(rank["sent_per_step"].values()) for rank in own["per_rank"])
            state = max(rank["bytes"]["model_state"] for rank in own["per_rank"])
            worst = max(worst, abs(ahead["step_seconds"]["total"] / found["step"] - 1))
            print(f"{schedule:12} {micro_batches:3}  {found['step'] * 1e3:6.1f} ms  "
                  f"{off(own['step_seconds']['total'], found['step'])}  "
                  f"{off(ahead['step_seconds']['total'], found['step']):>10}  {found['idle'] * 100:4.1f} %  "
                  f"{own['passes']['idle'] * 100:4.1f} %  {ahead['passes']['idle'] * 100:8.1f} %  "
                  f"{off(sent, found['sent'])}  {off(state, found['state'])}", flush=True)
    print(f"stage times of {options.schedules.split(',')[0]}: "
          + ", ".join(f"{f * 1e3:.2f} + {(i + w) * 1e3:.2f} ms" for f, i, w in base["times"])
          + f"; a message {base['message'] * 1e3:.3f} ms, the update {base['update'] * 1e3:.2f} ms")
    return worst


def check_sleeping(folder, options):
    """Likewise, of the passes of a step."""
    worst = 0
    asleep = [float(part) * 1e-3 for part in options.sleep.split(",")]
    layers = options.ranks * LAYERS_PER_RANK
    print(f"{'schedule':12} {'m':>3}  {'passes':>9}  {'predicted':>9}  {'idle':>6}  {'predicted':>9}")
    for schedule in options.schedules.split(","):
        for micro_batches in map(int, options.micro_batches.split(",")):
            spans = []
            for _ in range(options.repeats):
                trace = os.path.join(folder, "trace.json")
                names = ("--forward", "--backward_input", "--backward_weight")
                launch("sleeping_stages", ["--trace", trace, "--schedule", schedule, "--micro_batches", str(micro_batches),
                                           "--layers", str(layers)]
                       + [part for name, time in zip(names, asleep) for part in (name, f"{time * 1e3:g}")], options)
                spans.append(span_and_idle(read_trace(trace)))
            span, idle = (median([pair[k] for pair in spans]) for k in (0, 1))
            stage = [time * LAYERS_PER_RANK / CHUNKS.get(schedule, 1) for time in asleep]
            model = ["--layers", str(layers), "--parameters", str(16 * layers)]
            ahead = simulate(write_config(folder, schedule, micro_batches, options), model, [stage], 0, 0, options)
            worst = max(worst, abs(ahead["passes"]["makespan"] / span - 1))
            print(f"{schedule:12} {micro_batches:3}  {span * 1e3:6.1f} ms  {off(ahead['passes']['makespan'], span):>9}  "
                  f"{idle * 100:4.1f} %  {ahead['passes']['idle'] * 100:7.1f} %", flush=True)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of the job")
    parser.add_argument("--pipeline", type=int, help="ranks of a pipeline [all]")
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zb_h1,zb_h2,zbv,dualpipev")
    parser.add_argument("--micro_batches", default="4,8")
    parser.add_argument("--micro_batch_size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--sleep", help="milliseconds of forward, backward of the input and of the weights: 12,12,12")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.1)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    options.pipeline = options.pipeline or options.ranks
    if not options.sleep and options.ranks > os.cpu_count():
        print(f"simulate_check: {options.ranks} ranks on {os.cpu_count()} cores wait for cores, which is not predicted")
    with tempfile.TemporaryDirectory() as folder:
        worst = (check_sleeping if options.sleep else check_training)(folder, options)
    if worst > options.limit:
        sys.exit(f"simulate_check: a step is {worst:.1%} off, expected at most {options.limit:.0%}")


if __name__ == "__main__":
    main()

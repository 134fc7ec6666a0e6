"""dsengine against torch DDP, FSDP2 and DeepSpeed: the same GPT, weights, batches and optimizer, in turn on this machine.

  scripts/compare_peers [--rounds 3] [--steps 10] [--ranks 2] [--size small] [--build build/release] [--json FILE]
  scripts/draw_comparison FILE docs/images/comparison.svg

Every round launches each case once; a case's step time is the median over its steps of all rounds, its memory the median of the
ranks' peak resident bytes, its start-up the median time from launch to the end of the first step of the tiny GPT. What counts are
the ratios: absolute times belong to the machine and the moment. Losses are compared too: a case whose curve differs from DDP's
by more than 1e-4 is an error.
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", ".."))
TEXT = os.path.join(ROOT, "tests", "parity", "data", "kjv_1m.bin")
WARM = 3
SIZES = {"tiny": dict(layers=4, hidden=128, heads=4, seq_len=128), "small": dict(layers=6, hidden=512, heads=8, seq_len=256)}
CASES = ["ddp", "fsdp2", "ds0", "ds1", "ds2", "ds3", "ours0", "ours1", "ours2", "ours3"]
MORE = ["ds2offload", "ours2offload", "ds3offload", "ours3offload",  # run when --only names them
        "loop-ddp", "loop-fsdp", "engine0", "engine3"]  # loops of the program's own, and the engine's, with ds::FusedAdamW
# What a loop is compared with: torch's, the engine's with the same optimizer, the engine's with its own.
PARTNERS = {"loop-ddp": ["ddp", "engine0", "ours0"], "loop-fsdp": ["fsdp2", "engine3", "ours3"]}


def zero_section(case):
    """Of a case "ds3" or "ours3offload": offload moves the optimizer to the host, at stage 3 the parameters too."""
    name = case.removeprefix("ours").removeprefix("ds")
    section = {"stage": int(name[0])}
    if name.endswith("offload"):
        section["offload_optimizer"] = {"device": "cpu"}
        if section["stage"] == 3:
            section["offload_param"] = {"device": "cpu"}
    return section


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment():
    env = dict(os.environ, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false")
    env.pop("LD_PRELOAD", None)
    return env


def run(command, log):
    with open(log, "wb") as f:
        code = subprocess.call(command, stdout=f, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT)
    if code:
        sys.exit(f"failed with exit code {code}: {' '.join(command)}\n{open(log, errors='replace').read()[-3000:]}")


def run_python(script, ranks, arguments, folder, name):
    """Figures of each rank of a job in Python, which writes OUT.<rank> as JSON; OUT is the last argument it is given."""
    out = os.path.join(folder, "peer")
    run([sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}", "--master_addr=127.0.0.1",
         f"--master_port={free_port()}", script, *arguments, out], os.path.join(folder, name + ".log"))
    return [json.load(open(f"{out}.{r}")) for r in range(ranks)]


def run_gpt(build, ranks, config, flags, folder, name, launcher_flags=()):
    """Rows of the steps and summary of a job of the example, on the text that the peers read and in their order."""
    config_file, metrics = os.path.join(folder, "config.json"), os.path.join(folder, "metrics.jsonl")
    with open(config_file, "w") as f:
        json.dump(config, f)
    if os.path.exists(metrics):
        os.remove(metrics)
    run([os.path.join(build, "bin", "ds-launch"), "--num_procs", str(ranks), "--master_port", str(free_port()), *launcher_flags,
         os.path.join(build, "bin", "gpt"), "--deepspeed_config", config_file, "--data", TEXT, *flags, "--order", "sequential",
         "--metrics", metrics, "--generate", "0"], os.path.join(folder, name + ".log"))
    lines = [json.loads(line) for line in open(metrics)]
    return lines[:-1], lines[-1]["summary"]


def optimizer_section(lr):
    return {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}}


def run_peer(case, a, size, steps, folder):
    begin = time.time()
    ranks = run_python(os.path.join(HERE, "peer.py"), a.ranks, [case, size, str(steps), str(WARM), str(a.lr)], folder, case)
    return figures_of(ranks, begin)


def figures_of(ranks, begin):
    return {"step_seconds": ranks[0]["step_seconds"], "peak": [r["peak_rss_bytes"] for r in ranks],
            "loss": [statistics.mean(v) for v in zip(*(r["loss"] for r in ranks))],
            "start": max(r["first_step_at"] for r in ranks) - begin}


def run_ours(case, a, size, steps, folder):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": optimizer_section(a.lr),
              "zero_optimization": zero_section(case)}
    shape = [word for key, value in SIZES[size].items() for word in (f"--{key}", str(value))]
    begin = time.time()
    rows, summary = run_gpt(a.build, a.ranks, config, [*shape, "--steps", str(steps + WARM)], folder, case)
    whole = time.time() - begin
    # The first step ends before the remaining ones: launch to exit less the later steps is an upper bound of the start-up.
    return {"step_seconds": [r["step_seconds"] for r in rows[WARM:]], "peak": summary["peak_rss_bytes"],
            "loss": [r["loss"] for r in rows], "start": whole - sum(r["step_seconds"] for r in rows[1:])}


def run_loop(case, a, size, steps, folder):
    out = os.path.join(folder, "loop")
    shape = [str(value) for value in SIZES[size].values()]
    begin = time.time()
    run([os.path.join(a.build, "bin", "ds-launch"), "--num_procs", str(a.ranks), "--master_port", str(free_port()),
         os.path.join(a.build, "bin", "plain_loop"), case, *shape, str(steps), str(WARM), str(a.lr), TEXT, out],
        os.path.join(folder, case + ".log"))
    return figures_of([json.load(open(f"{out}.{r}")) for r in range(a.ranks)], begin)


def run_case(case, a, size, steps, folder):
    if case.startswith(("loop", "engine")):
        return run_loop(case, a, size, steps, folder)
    return (run_ours if case.startswith("ours") else run_peer)(case, a, size, steps, folder)


def settings(a):
    """What has to be known beside figures: what ran, how often, where and when."""
    with open("/proc/cpuinfo") as f:
        models = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    parameters = {"tiny": "0.9 million", "small": "19 million"}[a.size]
    return {"model": f"GPT of {parameters} parameters", "ranks": a.ranks, "rounds": a.rounds, "steps": a.steps,
            "machine": f"{os.cpu_count()} x {models[0] if models else os.uname().machine}", "date": time.strftime("%Y-%m-%d")}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--size", choices=SIZES, default="small")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--only", default=",".join(CASES),
                   help=f"cases, comma separated (ddp is always run); besides the default {','.join(MORE)}")
    p.add_argument("--json", help="also write the figures to this file, for scripts/draw_comparison")
    a = p.parse_args()
    a.build = os.path.abspath(a.build)
    cases = [c for c in CASES + MORE if c == "ddp" or c in a.only.split(",")]
    runs, starts = {c: [] for c in cases}, {c: [] for c in cases}
    with tempfile.TemporaryDirectory() as folder:
        for c in cases:  # once uncounted: page cache, DeepSpeed's compiled ops
            run_case(c, a, "tiny", 1, folder)
        for _ in range(a.rounds):
            for c in cases:
                runs[c].append(run_case(c, a, a.size, a.steps, folder))
                starts[c].append(run_case(c, a, "tiny", 1, folder)["start"])
    figures = {}
    for c in cases:
        figures[c] = {"step_seconds": statistics.median(s for r in runs[c] for s in r["step_seconds"]),
                      "peak_gib": statistics.median(p for r in runs[c] for p in r["peak"]) / 2**30,
                      "start_seconds": statistics.median(starts[c]),
                      "loss_difference_to_ddp": max(abs(x - y) for x, y in zip(runs[c][0]["loss"], runs["ddp"][0]["loss"]))}
    print(f"{a.size} GPT, {a.ranks} ranks x 1 thread, {a.rounds} rounds of {a.steps} steps; medians, and ratios to the peer in the same run")
    print(f"{'case':12s} {'s/step':>8s} {'GiB/rank':>9s} {'start s':>8s}   speed vs ddp   speed / memory / start vs DeepSpeed, same stage")
    wrong = []
    for c in cases:
        f = figures[c]
        line = f"{c:12s} {f['step_seconds']:8.3f} {f['peak_gib']:9.3f} {f['start_seconds']:8.2f}   {figures['ddp']['step_seconds'] / f['step_seconds']:8.3f} x"
        peer = figures.get("ds" + c[4:]) if c.startswith("ours") else None
        if peer:
            line += (f"     {peer['step_seconds'] / f['step_seconds']:.3f} x / {f['peak_gib'] / peer['peak_gib']:.3f}"
                     f" / {f['start_seconds'] / peer['start_seconds']:.3f}")
        line += "".join(f"     {figures[p]['step_seconds'] / f['step_seconds']:.3f} x {p}" for p in PARTNERS.get(c, []) if p in figures)
        print(line)
        if f["loss_difference_to_ddp"] > 1e-4:
            wrong.append(c)
    if a.json:
        with open(a.json, "w") as f:
            json.dump({**settings(a), "cases": figures}, f, indent=1)
            f.write("\n")
    if wrong:
        sys.exit(f"the losses of {wrong} differ from DDP's by more than 1e-4: these figures compare different work")


if __name__ == "__main__":
    main()

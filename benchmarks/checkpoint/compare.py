"""Checkpoints of dsengine against torch.save, torch.distributed.checkpoint (FSDP2, sync and async) and DeepSpeed: the same
model, optimizer states, ranks and disk, one case after the other.

  PYTHON_WITH_TORCH_AND_DEEPSPEED benchmarks/checkpoint/compare.py [--layers 40] [--width 1024] [--rows 256] [--rounds 3]
      [--folder DIR] [--build build/release] [--only ours2,ds2]

save: seconds until the call returns; durable: until the files are on the disk (dsengine syncs them before it publishes, so both
are one; for the others, the call and sync(2)). load: with the files in the page cache. stall: what an asynchronous save adds to
three steps, as a share of one step. Medians; ratios are to dsengine at the same stage (torch: stage 0, dcp: stage 3).
"""
import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", ".."))
CASES = ["torch", "ours0", "ds0", "ours1", "ds1", "ours2", "ds2", "dcp", "ours3", "ds3"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Unfinished(Exception):
    pass


def run(command, limit):
    env = dict(os.environ, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, text=True)
        try:
            job.wait(limit)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)  # the launcher ends its ranks
            job.wait()
            raise Unfinished(f"not finished after {limit} s") from None
        log.seek(0)
        output = log.read()
    lines = [line for line in output.splitlines() if "RESULT {" in line]
    if job.returncode or not lines:
        sys.exit(f"failed with exit code {job.returncode}: {' '.join(command)}\n{output[-4000:]}")
    return json.loads(lines[0].split("RESULT ", 1)[1])


def run_ours(a, stage, folder, ranks=2, load_only=False):
    config = os.path.join(folder, "config.json")
    with open(config, "w") as f:
        json.dump({"train_micro_batch_size_per_gpu": a.rows, "log_level": "warning",
                   "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": stage},
                   "checkpoint": {"durable": not a.not_durable}}, f)
    binary = os.path.join(a.build, "bin")
    return run([os.path.join(binary, "ds-launch"), "--num_procs", str(ranks), "--master_port", str(free_port()),
                os.path.join(binary, "checkpoint_bench"), "--config", config, "--folder", os.path.join(folder, "saved"), "--layers",
                str(a.layers), "--width", str(a.width), "--rows", str(a.rows), "--rounds", str(a.rounds)]
               + (["--load_only"] if load_only else []), a.limit)


def run_case(a, case, folder):
    if case.startswith("ours"):
        return run_ours(a, int(case[4]), folder)
    os.makedirs(os.path.join(folder, "saved"), exist_ok=True)
    return run([sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", "--master_addr=127.0.0.1",
                f"--master_port={free_port()}", os.path.join(HERE, "peer.py"), case, os.path.join(folder, "saved"), str(a.layers),
                str(a.width), str(a.rows), str(a.rounds)], a.limit)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=40)
    p.add_argument("--width", type=int, default=1024)
    p.add_argument("--rows", type=int, default=256)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--folder", help="where to write; a real disk")
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"))
    p.add_argument("--limit", type=float, default=300, help="seconds that a case may take")
    p.add_argument("--not_durable", action="store_true", help="dsengine without fsync, as the others' calls return; its durable column is void then")
    p.add_argument("--only", default=",".join(CASES))
    p.add_argument("--json", help="also write the figures to this file")
    a = p.parse_args()
    a.build = os.path.abspath(a.build)
    figures = {}
    for case in [c for c in CASES if c in a.only.split(",")]:
        folder = tempfile.mkdtemp(dir=a.folder or a.build)
        try:
            result = run_case(a, case, folder)
        except Unfinished as reason:
            print(f"{case}: {reason}")
            continue
        finally:
            shutil.rmtree(folder)
        result.setdefault("durable", result["save"])
        figures[case] = {key: statistics.median(values) for key, values in result.items() if isinstance(values, list) and values}
    mib = a.layers * a.width * a.width * 12 / 2**20
    print(f"{a.layers * a.width * a.width / 1e6:.0f} M parameters with AdamW states, {mib:.0f} MiB, 2 ranks; medians of {a.rounds}")
    print(f"{'case':8s} {'save s':>8s} {'durable':>8s} {'load s':>8s} {'stall':>7s}   over dsengine: save, durable, load")
    for case, f in figures.items():
        stall = f"{100 * f['stall'] / f['step']:6.1f}%" if "stall" in f else "      -"
        line = f"{case:8s} {f['save']:8.3f} {f['durable']:8.3f} {f['load']:8.3f} {stall}"
        ours = figures.get({"torch": "ours0", "dcp": "ours3"}.get(case, "ours" + case[2:]))
        if ours and not case.startswith("ours"):
            line += "   " + ", ".join(f"{f[key] / ours[key]:.2f}" for key in ("save", "durable", "load"))
        print(line)
    if "ours2" in figures:  # into another number of ranks, in turn with the same one
        folders = {ranks: tempfile.mkdtemp(dir=a.folder or a.build) for ranks in (2, 4)}
        try:
            loads = {2: [], 4: []}
            for ranks, folder in folders.items():
                run_ours(a, 2, folder, ranks=ranks)
            for _ in range(2):
                for ranks, folder in folders.items():
                    loads[ranks] += run_ours(a, 2, folder, ranks=2, load_only=True)["load"]
        finally:
            for folder in folders.values():
                shutil.rmtree(folder)
        same, other = statistics.median(loads[2]), statistics.median(loads[4])
        print(f"stage 2, 4 ranks' checkpoint into 2 ranks: {other:.3f} s, {other / same:.2f} of 2 ranks' into 2")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(figures, f, indent=1)


if __name__ == "__main__":
    main()

"""Starts one case of the checkpoint benchmarks: dsengine's checkpoint_bench or peer.py, in processes of its own."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", ".."))


def add_options(p, layers, rows, rounds, repeats):
    p.add_argument("--layers", type=int, default=layers)
    p.add_argument("--width", type=int, default=1024)
    p.add_argument("--rows", type=int, default=rows)
    p.add_argument("--rounds", type=int, default=rounds)
    p.add_argument("--repeats", type=int, default=repeats, help="how often all cases run, by turns")
    p.add_argument("--folder", help="where to write; a real disk")
    p.add_argument("--build", default=os.path.join(ROOT, "build", "release"), type=os.path.abspath)
    p.add_argument("--limit", type=float, default=300, help="seconds that a case may take")
    p.add_argument("--json", help="also write the figures to this file")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Unfinished(Exception):
    pass


def run(command, limit):
    """The line of JSON that rank 0 prints. Throws Unfinished with the end of the output."""
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
        raise Unfinished(f"failed with exit code {job.returncode}: {' '.join(command)}\n{output[-4000:]}")
    return json.loads(lines[0].split("RESULT ", 1)[1])


def run_ours(a, stage, folder, *further, ranks=2, durable=True):
    config = os.path.join(folder, "config.json")
    with open(config, "w") as f:
        json.dump({"train_micro_batch_size_per_gpu": a.rows, "log_level": "warning",
                   "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": stage},
                   "checkpoint": {"durable": durable}}, f)
    binary = os.path.join(a.build, "bin")
    return run([os.path.join(binary, "ds-launch"), "--num_procs", str(ranks), "--master_port", str(free_port()),
                os.path.join(binary, "checkpoint_bench"), "--config", config, "--folder", os.path.join(folder, "saved"), "--layers",
                str(a.layers), "--width", str(a.width), "--rows", str(a.rows), "--rounds", str(a.rounds), *further], a.limit)


def run_peer(a, kind, folder, *further, ranks=2, durable=True):
    os.makedirs(os.path.join(folder, "saved"), exist_ok=True)
    return run([sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}", "--master_addr=127.0.0.1",
                f"--master_port={free_port()}", os.path.join(HERE, "peer.py"), kind, os.path.join(folder, "saved"), str(a.layers),
                str(a.width), str(a.rows), str(a.rounds), *(() if durable else ("--not_durable",)), *further], a.limit)


def run_cases(a, cases, *further, **settings):
    """What the cases that --only leaves print, {case: {key: values}}, each a.repeats times in a folder of its own, by turns."""
    samples = {}
    for _ in range(a.repeats):
        for case in [c for c in cases if c in a.only.split(",")]:
            folder = tempfile.mkdtemp(dir=a.folder or a.build)
            try:
                if case.startswith("ours"):
                    result = run_ours(a, int(case[4]), folder, *further, **settings)
                else:
                    result = run_peer(a, case, folder, *further, **settings)
            except Unfinished as reason:
                print(f"{case}: {reason}")
                continue
            finally:
                shutil.rmtree(folder)
            for key, values in result.items():
                samples.setdefault(case, {}).setdefault(key, []).extend(values)
    return samples


def megabytes(a):
    parameters = a.layers * a.width * a.width
    return f"{parameters / 1e6:.0f} M parameters with AdamW states, {parameters * 12 / 2**20:.0f} MiB"

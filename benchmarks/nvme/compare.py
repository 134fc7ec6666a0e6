#!/usr/bin/env python3
"""Files of state on a disk against fio: the same folder, size, block size and queue depth.

    benchmarks/nvme/compare.py --folder /nvme [--mib 1024] [--block_size 1048576] [--queue_depth 8] [--rounds 9]

Runs fio (ioengine=io_uring, direct=1) and nvme_bench in turn, --rounds times: sequential writes of blocks that the file
already has, then sequential reads. Prints the median GB/s of each (1 GB = 10^9) and their ratio; exit code 1 when one
is below 0.80. Ends with nvme_bench's lines about optimizer steps. Needs fio, and twice --mib of free space.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LEAST = 0.80


def run(command):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"nvme: cannot start {command[0]}: install fio, or build nvme_bench")
    if done.returncode != 0:
        sys.exit(f"nvme: {' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def fio(path, direction, options):
    """GB/s."""
    report = json.loads(run(["fio", "--name=nvme", f"--filename={path}", f"--rw={direction}", f"--size={options.mib}m",
                             f"--bs={options.block_size}", f"--iodepth={options.queue_depth}", "--ioengine=io_uring",
                             "--direct=1", "--output-format=json"]))
    return report["jobs"][0][direction]["bw_bytes"] / 1e9


def ours(options, *flags):
    """The lines of nvme_bench, and their GB/s by name."""
    lines = run([os.path.join(options.build, "bin/nvme_bench"), "--folder", options.folder, "--mib", str(options.mib),
                 "--block_size", str(options.block_size), "--queue_depth", str(options.queue_depth),
                 *flags]).splitlines()
    return lines, {line[:22].strip(): float(line[22:].split()[0]) for line in lines}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="a folder on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--block_size", type=int, default=1 << 20)
    parser.add_argument("--queue_depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    speeds = {(who, direction): [] for who in ("fio", "dsengine") for direction in ("write", "read")}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(folder, "fio")
        fio(path, "write", options)  # makes the file
        for _ in range(options.rounds):
            for direction in ("write", "read"):
                speeds["fio", direction].append(fio(path, direction, options))
            _, found = ours(options, "--no_steps")
            for direction in ("write", "read"):
                speeds["dsengine", direction].append(found[direction])
    worst = 1.0
    for direction in ("write", "read"):
        theirs, own = (statistics.median(speeds[who, direction]) for who in ("fio", "dsengine"))
        worst = min(worst, own / theirs)
        spread = ", ".join(f"{who} {min(values):.2f} to {max(values):.2f}" for (who, what), values in speeds.items()
                           if what == direction)
        print(f"{direction:6} fio {theirs:.3f} GB/s  dsengine {own:.3f} GB/s: {own / theirs:.2f} of fio ({spread})")
    print("\n".join(line for line in ours(options)[0] if line.startswith("step")))
    if worst < LEAST:
        sys.exit(f"nvme: expected at least {LEAST} of fio")


if __name__ == "__main__":
    main()

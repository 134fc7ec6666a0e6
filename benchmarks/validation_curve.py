"""Runs of build/*/bin/validation_curve with a file of configs/, for data_efficiency/compare.py and model_compression/compare.py."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def add_options(parser, steps):
    parser.add_argument("--steps", type=int, default=steps, help=f"of a run ({steps})")
    parser.add_argument("--every", type=int, default=20, help="steps between two validations (20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", default=os.path.join(ROOT, "tests/parity/data/kjv_1m.bin"), help="nine tenths are trained on")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))


def config_of(case):
    with open(os.path.join(ROOT, "configs", f"{case}.json"), encoding="utf-8") as file:
        return json.load(file)


def split_text(path, folder):
    """Files with the text to train on and the one to validate on."""
    with open(path, "rb") as file:
        text = file.read()
    cut = len(text) * 9 // 10
    paths = []
    for name, part in (("text", text[:cut]), ("validation", text[cut:])):
        paths.append(os.path.join(folder, name))
        with open(paths[-1], "wb") as file:
            file.write(part)
    return paths


def train(what, config, seed, folder, options, *flags):
    """What the program writes; "curve" is a list of {"step", "tokens", "seconds", "loss"}."""
    paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("config", "out")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config | {"seed": seed, "log_level": "warning"}, file)
    text, validation = split_text(options.data, folder)
    command = [os.path.join(options.build, "bin/validation_curve"), "--config", paths["config"], "--text", text, "--validation",
               validation, "--steps", str(options.steps), "--every", str(options.every), "--seed", str(seed), "--out",
               paths["out"], *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    if done.returncode != 0:
        sys.exit(f"{what} ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["out"], encoding="utf-8") as file:
        return json.load(file)


def shown(values, digits=2):
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_table(head, compare, options):
    """Under its head line the rows that compare(folder, options) gives."""
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(folder, options)
    print(f"\n{where_and_when()}\n\n{head}\n|" + "---|" * (head.count("|") - 1))
    print("\n".join(rows))


def where_and_when():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, one thread, {time.strftime('%Y-%m-%d')}"

#!/usr/bin/env python3
"""Loss of the 1-bit optimizers beside the dense ones that they stand in for.

    benchmarks/compression/convergence.py [--steps 600] [--lr LR] [--freeze SHARE] [--only NAMES] [--out docs/images]

Trains the example's GPT on ranks of this host with AdamW, OneBitAdam and ZeroOneAdam, then with Lamb and OneBitLamb:
the same start, batches, learning rates and decay. Reports the mean training loss of the last 30 steps and the loss on
the last twentieth of the text, which no run trains on, and writes compression_convergence.json (all curves) and
compression_convergence.svg to --out. Exit code 1 when a training loss is above the dense optimizer's by more than 2 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from loss_plot import write_plot
from policies import policy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NEAR = 0.02
LAST = 30
SHARED = {"AdamW": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01},
          "Lamb": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.01}}


# By name: the dense optimizer.
CASES = {"AdamW": "AdamW", "OneBitAdam": "AdamW", "ZeroOneAdam": "AdamW", "Lamb": "Lamb", "OneBitLamb": "Lamb"}


def config_of(name, params, steps):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": name, "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": steps // 10,
                                                           "cos_min_ratio": 0.1}},
        "zero_optimization": {"stage": 0},
    }


def gpt(config, folder, options, words):
    """Returns (losses, summary) of a run of the example."""
    paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("config", "metrics")}
    with open(paths["config"], "w", encoding="utf-8") as file:
        json.dump(config, file)
    if os.path.exists(paths["metrics"]):
        os.unlink(paths["metrics"])
    command = [os.path.join(options.build, "bin/ds-launch"), "--num_procs", str(options.procs), "--master_port",
               str(options.port), "--", os.path.join(options.build, "bin/gpt"), "--deepspeed_config", paths["config"],
               "--generate", "0", "--metrics", paths["metrics"], *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"convergence: {config['optimizer']['type']} ended with exit code {done.returncode}:\n{done.stdout}")
    with open(paths["metrics"], encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line["loss"] for line in lines if "loss" in line], lines[-1]["summary"]


def held_out_loss(folder, options):
    """Of the saved weights. Nothing is trained: the learning rate is 0."""
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None,
              "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_optimization": {"stage": 0}}
    sequences = os.path.getsize(os.path.join(folder, "held_out.txt")) // 129
    losses, _ = gpt(config, folder, options,
                    ["--data", os.path.join(folder, "held_out.txt"), "--init", os.path.join(folder, "weights"),
                     "--order", "sequential", "--steps", str(sequences // (4 * options.procs))])
    return statistics.mean(losses)


def train(name, dense, folder, options):
    """Means over the seeds, and the curve of each."""
    params = {**SHARED[dense], **({"lr": options.lr} if options.lr else {}),
              **policy(name, options.steps, options.freeze)}
    curves, held_out, sent = [], [], 0
    for seed in options.seeds:
        losses, summary = gpt(config_of(name, params, options.steps), folder, options,
                              ["--data", os.path.join(folder, "text.txt"), "--steps", str(options.steps), "--seed",
                               str(seed), "--save", os.path.join(folder, "weights")])
        curves.append([round(loss, 4) for loss in losses])
        sent = summary["comm_bytes_sent"][0]
        held_out.append(held_out_loss(folder, options))
    last = statistics.mean(statistics.mean(curve[-LAST:]) for curve in curves)
    return {"optimizer": name, "dense": dense, "params": params, "loss": round(last, 4),
            "held_out_loss": round(statistics.mean(held_out), 4), "bytes_sent": sent, "curves": curves}


def split_text(path, folder):
    with open(path, "rb") as file:
        text = file.read()
    cut = len(text) * 19 // 20
    for name, part in (("text.txt", text[:cut]), ("held_out.txt", text[cut:])):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(part)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234])
    parser.add_argument("--lr", type=float, help="of all (AdamW and its forms 1e-3, Lamb and its form 1e-2)")
    parser.add_argument("--freeze", type=float, help="share of the steps before the freeze (see policies.py)")
    parser.add_argument("--procs", type=int, default=2, help="ranks (2)")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--data", default=os.path.join(ROOT, "tests/parity/data/kjv_1m.bin"))
    parser.add_argument("--only", nargs="+", help="these optimizers; a dense one of theirs must be among them")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs/images"))
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    options = parser.parse_args()
    results, far = {}, []
    with tempfile.TemporaryDirectory() as folder:
        split_text(options.data, folder)
        for name, dense in CASES.items():
            if options.only and name not in options.only:
                continue
            result = results[name] = train(name, dense, folder, options)
            reference = results[dense]
            line = f"{name:12} loss {result['loss']:.4f}  held-out {result['held_out_loss']:.4f}"
            if name != dense:
                off, off_held_out = (result[key] / reference[key] - 1 for key in ("loss", "held_out_loss"))
                line += (f"  {off * 100:+.2f} %, {off_held_out * 100:+.2f} %  "
                         f"{reference['bytes_sent'] / result['bytes_sent']:.1f} times fewer bytes")
                if off > NEAR:
                    far.append(name)
            print(line, flush=True)
    os.makedirs(options.out, exist_ok=True)
    target = os.path.join(options.out, "compression_convergence")
    with open(f"{target}.json", "w", encoding="utf-8") as file:
        json.dump({"steps": options.steps, "ranks": options.procs, "seeds": options.seeds,
                   "runs": list(results.values())}, file)
        file.write("\n")
    write_plot(f"{target}.svg", results)
    if far:
        sys.exit(f"convergence: expected a loss within {NEAR:.0%} of the dense optimizer's: {', '.join(far)}")


if __name__ == "__main__":
    main()

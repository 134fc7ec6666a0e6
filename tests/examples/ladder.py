#!/usr/bin/env python3
"""Runs one program of the examples' ladder under ds-launch, as its first comment says, and judges what it learned.

  ladder.py EXAMPLE BUILD-FOLDER SCRATCH-FOLDER SOURCE-FOLDER
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys

LIMIT = 100  # seconds


class Ladder:
    def __init__(self, build, scratch, source):
        self.build, self.scratch, self.source = build, scratch, source

    def run(self, folder, program, *arguments, ranks=2):
        """What the program printed; a failure ends the test with all of it."""
        command = [f"{self.build}/bin/ds-launch", "--num_procs", str(ranks), f"{self.build}/bin/{program}", *arguments]
        done = subprocess.run(command, cwd=f"{self.source}/examples/{folder}", stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=LIMIT, env=dict(os.environ, OMP_NUM_THREADS="1"))
        print(" ".join(command), done.stdout, sep="\n")
        if done.returncode:
            sys.exit(f"{program} ended with exit code {done.returncode}")
        return done.stdout

    def first_step(self):
        loss = losses(self.run("01_first_step", "first_step"))
        check(loss[300] < 0.01, "the product of two numbers is learned, whose mean square is 0.11", loss)

    def own_data(self):
        text = self.run("02_own_data", "own_data")
        accuracy = [float(value) for value in re.findall(r"accuracy ([\d.]+)", text)]
        check(len(accuracy) == 5 and accuracy[-1] > 0.7, "seven waves of ten are named rightly, of four kinds", accuracy)

    def zero3_offload(self):
        text = self.run("03_zero3_offload", "zero3_offload")
        loss = losses(text)
        check(loss[40] < loss[10], "the loss falls", loss)
        device, host = map(float, re.search(r"rank: ([\d.]+) MiB on the device, ([\d.]+) MiB in host", text).groups())
        # Half of 526,593 parameters: 2 bytes of weight, and 4 each of master and two moments.
        check(device == 0 and 3.5 < host < 6, "the state of this rank lies in host memory", (device, host))

    def checkpoint_resume(self):
        folders = [f"{self.scratch}/{name}" for name in ("at_once", "in_parts")]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        at_once = losses(self.run("04_checkpoint_resume", "checkpoint_resume", folders[0], "40"))
        self.run("04_checkpoint_resume", "checkpoint_resume", folders[1], "20")
        text = self.run("04_checkpoint_resume", "checkpoint_resume", folders[1], "40")
        check("goes on from global_step20" in text, "the second start finds the checkpoint of the first", text)
        check(losses(text) == {step: at_once[step] for step in (30, 40)}, f"the losses of 40 steps at once, {at_once}",
              losses(text))

    def spirals(self):
        text = self.run("05_pipeline", "spirals", "--deepspeed_config", "ds_config.json", "--steps", "100", ranks=4)
        loss = losses(text)
        check(loss[100] < loss[50], "the loss falls", loss)
        by_file = losses(self.run("05_pipeline", "spirals", "--deepspeed_config", self.config_with_schedule_file(),
                                  "--steps", "50", ranks=4))
        check(by_file[50] == loss[50], f"the loss of the schedule's kind, {loss[50]}, by a file with its actions", by_file)

    def config_with_schedule_file(self):
        """A config whose schedule is a .csv file that ds-tool has written, with the mark that editors put before a text."""
        os.makedirs(self.scratch, exist_ok=True)
        schedule, config = f"{self.scratch}/schedule.csv", f"{self.scratch}/by_file.json"
        subprocess.run([f"{self.build}/bin/ds-tool", "schedule", "--kind", "zb_h1", "--stages", "2", "--micro_batches", "8",
                        "--csv", schedule], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
        with open(schedule, encoding="utf-8") as file:
            actions = file.read()
        with open(schedule, "w", encoding="utf-8-sig") as file:
            file.write(actions)
        with open(f"{self.source}/examples/05_pipeline/ds_config.json", encoding="utf-8") as file:
            settings = json.load(file)
        settings["pipeline"]["schedule"] = schedule
        with open(config, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        return config

    def gpt_on_three_axes(self):
        text = self.run("3d_gpt", "3d_gpt", "--deepspeed_config", "ds_config.json", "--steps", "40", ranks=8)
        loss = losses(text)
        check(loss[20] < 3.5 and loss[40] < loss[20], "the loss falls, from log 128 = 4.9", loss)
        check("\nThis is the " in text, "a sample of text is printed", text)

    def imagenet(self):
        self.learn_stripes("imagenet")

    def imagenet_ddp(self):
        self.learn_stripes("imagenet_ddp")

    def learn_stripes(self, program):
        text = self.run("loops/imagenet", program)
        check("15 layers of BatchNorm over all ranks" in text, "every BatchNorm of the network is converted", text)
        accuracy = [float(value) for value in re.findall(r"Acc@1 ([\d.]+)", text)]
        check(len(accuracy) == 5 and accuracy[-1] > 80, "the direction of stripes is learned, of four", accuracy)

    def lit_autoencoder(self):
        loss = losses(self.run("loops", "lit_autoencoder"))
        check(len(loss) == 4 and loss[200] < loss[50] and loss[200] < 0.03, "rectangles are learned, whose variance is 0.15", loss)

    def ddp_toy(self):
        os.makedirs(self.scratch, exist_ok=True)
        text = self.run("loops", "ddp_toy", f"{self.scratch}/ddp_toy.pt")
        loss = losses(text)
        check(loss[200] < loss[100] and loss[200] < 0.5, "sums are learned, whose mean square is 2", loss)
        check("checkpoint: ranks agree" in text, "every rank takes the same step from the checkpoint", text)
        check("two parts: ranks agree" in text, "replicas of a model with parts on two devices take the same steps", text)

    def fsdp_tutorial(self):
        folder = f"{self.scratch}/fsdp_tutorial"
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(self.scratch, exist_ok=True)
        for flags in ([], ["--explicit-prefetching"], ["--mixed-precision"]):
            text = self.run("loops/fsdp_tutorial", "fsdp_tutorial", *flags, "--checkpoints", folder)
            loss = losses(text)
            check(loss[40] < loss[10], "the loss falls", loss)
            check(int(re.search(r"holds (\d+) KiB", text).group(1)) < 500, "half of 210,240 parameters of 4 bytes", text)
        check(loss[10] < 1, "the third start goes on from the checkpoint of the second", loss)

    def train_exported(self):
        os.makedirs(self.scratch, exist_ok=True)
        model, data = f"{self.scratch}/hf_gpt2.pt2", f"{self.scratch}/tokens.safetensors"
        shutil.copy(f"{self.source}/tests/exported/data/hf_gpt2.pt2", model)
        tokens = [(i + t * (1 + i % 3)) % 32 for i in range(64) for t in range(8)]
        write_tokens(data, {"input_ids": tokens, "labels": tokens}, [64, 8])
        loss = losses(self.run("exported", "train_exported", model, data))
        check(loss[100] < loss[1] - 0.5, "the loss falls", loss)
        again = losses(self.run("exported", "train_exported", f"{self.scratch}/hf_gpt2.trained.pt2", data, "--steps", "1"))
        check(again[1] < loss[1] - 0.5, "the second start goes on from the weights that the first has written", again)

    def llama(self):
        """A small model from a config.json, trained whole, adapted, merged and trained on."""
        work = f"{self.scratch}/llama"
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        self.run("llama", "llama", "new", "--config", "config.json", "--out", f"{work}/base", ranks=1)
        text = f"{work}/text.txt"
        os.symlink(f"{self.source}/tests/parity/data/kjv_1m.bin", text)  # bytes, which a file *.bin would not be
        train = ["train", "--deepspeed_config", "ds_config.json", "--seq_len", "32", "--data", text]
        whole = losses(self.run("llama", "llama", *train, "--model", f"{work}/base", "--steps", "40", "--export",
                                f"{work}/trained"))
        check(abs(whole[1] - 5.5) < 0.2 and whole[40] < 4, "the loss falls, from log 256 = 5.5", whole)
        adapted = losses(self.run("llama", "llama", *train, "--model", f"{work}/trained", "--lora_rank", "4", "--steps",
                                  "20", "--activation_checkpointing", "--export", f"{work}/adapter"))
        check(adapted[1] < whole[1] - 1, "adapters begin with what was trained", adapted)
        self.run("llama", "llama", "merge", "--model", f"{work}/trained", "--adapter", f"{work}/adapter", "--out",
                 f"{work}/merged", ranks=1)
        # The first batch of two runs is the same: merged weights and the adapter beside its base compute one loss.
        first = [losses(self.run("llama", "llama", *train, "--steps", "1", "--model", f"{work}/{base}", *more))[1]
                 for base, more in (("merged", []), ("trained", ["--adapter", f"{work}/adapter"]))]
        check(abs(first[0] - first[1]) < 1e-4, "the merged weights give the loss of base and adapter", first)


def write_tokens(path, tensors, shape):
    """A safetensors file of int64 tensors of one shape."""
    size = 8 * len(next(iter(tensors.values())))
    header = json.dumps({name: {"dtype": "I64", "shape": shape, "data_offsets": [size * i, size * (i + 1)]}
                         for i, name in enumerate(tensors)}).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for values in tensors.values():
            file.write(struct.pack(f"<{len(values)}q", *values))


def losses(text):
    """The loss of each step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([-+.\de]+)", text)}


def check(holds, what, found):
    if not holds:
        sys.exit(f"expected: {what}; found {found}")


if __name__ == "__main__":
    example, *folders = sys.argv[1:]
    getattr(Ladder(*folders), {"3d_gpt": "gpt_on_three_axes"}.get(example, example))()

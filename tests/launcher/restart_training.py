#!/usr/bin/env python3
"""usage: restart_training.py BUILD SCRATCH SOURCE

Trains the GPT on two ranks, one of which is killed twice. ds-launch starts the ranks again, they go on from the latest
checkpoint, and every loss has the bits of a run without interruption.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from metrics_file import losses_of

BUILD, SCRATCH, SOURCE = (os.path.abspath(path) for path in sys.argv[1:4])
STEPS = 60
KILLED_AFTER = [(1, 7), (0, 26)]  # rank, step
SAVE_INTERVAL = 5


def command(name, flags, arguments):
    return [f"{BUILD}/bin/ds-launch", "--standalone", "--num_procs", "2", "--log_level", "debug", *flags, "--",
            f"{BUILD}/bin/gpt", "--deepspeed_config", f"{SOURCE}/configs/zero2.json", "--data",
            f"{SOURCE}/tests/parity/data/kjv_1m.bin", "--layers", "2", "--hidden", "128", "--generate", "0", "--steps",
            str(STEPS), "--metrics", f"{SCRATCH}/{name}.jsonl", *arguments]


def losses(name):
    return losses_of(f"{SCRATCH}/{name}.jsonl")


def fail(text, log=""):
    sys.exit(f"FAILED: {text}\n{log[-8000:]}")


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os.makedirs(SCRATCH)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole", [], []), check=True, stdout=subprocess.DEVNULL, env=environment)

    saves = f"{SCRATCH}/saves"
    with open(f"{SCRATCH}/log", "w") as log:
        job = subprocess.Popen(command("killed", ["--max_restarts", "3"],
                                       ["--save_checkpoint", saves, "--load_checkpoint", saves, "--save_interval",
                                        str(SAVE_INTERVAL)]), stdout=log, stderr=log, env=environment)

    def said():
        with open(f"{SCRATCH}/log") as file:
            return file.read()

    for start, (rank, step) in enumerate(KILLED_AFTER):
        end = time.monotonic() + 120
        while len(losses("killed")) < step:
            if job.poll() is not None or time.monotonic() > end:
                fail(f"step {step} was not reached", said())
            time.sleep(0.005)
        pids = re.findall(rf"rank {rank} runs as pid (\d+)", said())
        if len(pids) != start + 1:
            fail(f"rank {rank} has started {len(pids)} times, not {start + 1}", said())
        os.kill(int(pids[-1]), signal.SIGKILL)
    try:
        code = job.wait(120)
    except subprocess.TimeoutExpired:
        job.kill()
        fail("the job did not end", said())
    text = said()
    if code != 0:
        fail(f"exit code {code}", text)
    for words in ("restart 1 of 3", "restart 2 of 3", "killed by SIGKILL"):
        if words not in text:
            fail(f"nothing says {words!r}", text)
    if len(re.findall("^goes on from ", text, re.MULTILINE)) != 2:
        fail("it did not go on from a checkpoint twice", text)
    whole, killed = losses("whole"), losses("killed")
    if sorted(whole) != list(range(1, STEPS + 1)) or whole != killed:
        differing = [step for step in whole if whole[step] != killed.get(step)]
        fail(f"losses differ, in steps {differing}", text)
    print(f"{STEPS} steps, two of its ranks killed: every loss is bit for bit that of the run that went through")


main()

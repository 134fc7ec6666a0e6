"""The GPT of examples/gpt, small, for tests that start it in many ways: its words, and whether it has learned the same."""
import re

from hosts import GPT, SCRATCH, SOURCE, expect

STEPS = 3


def gpt(name):
    return [GPT, "--deepspeed_config", f"{SOURCE}/configs/zero2.json", "--data", f"{SOURCE}/tests/parity/data/kjv_1m.bin",
            "--layers", "1", "--hidden", "32", "--seq_len", "32", "--steps", str(STEPS), "--generate", "0", "--metrics",
            f"{SCRATCH}/{name}.jsonl"]


def losses(name):
    with open(f"{SCRATCH}/{name}.jsonl") as file:
        found = [float(loss) for loss in re.findall(r'"loss": ?([0-9.]+)', file.read())]
    expect(len(found) == STEPS, f"{name}: expected the losses of {STEPS} steps, found {found}")
    return found


def expect_same_losses(name, reference):
    """But for the order of sums, which depends on the transport."""
    pairs = list(zip(losses(name), losses(reference)))
    expect(all(abs(one - other) < 1e-4 for one, other in pairs), f"{name} and {reference} have the losses {pairs}")

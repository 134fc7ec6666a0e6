"""The GPT of examples/gpt, small, for tests that start it in many ways: its words, and whether it has learned the same."""
from hosts import GPT, SCRATCH, SOURCE, expect
from metrics_file import losses_of

STEPS = 3


def gpt(name):
    return [GPT, "--deepspeed_config", f"{SOURCE}/configs/zero2.json", "--data", f"{SOURCE}/tests/parity/data/kjv_1m.bin",
            "--layers", "1", "--hidden", "32", "--seq_len", "32", "--steps", str(STEPS), "--generate", "0", "--metrics",
            f"{SCRATCH}/{name}.jsonl"]


def losses(name):
    found = list(losses_of(f"{SCRATCH}/{name}.jsonl").values())
    expect(len(found) == STEPS, f"{name}: expected the losses of {STEPS} steps, found {found}")
    return found


def expect_same_losses(name, reference):
    """But for the order of sums, which depends on the transport."""
    pairs = list(zip(losses(name), losses(reference)))
    expect(all(abs(one - other) < 1e-4 for one, other in pairs), f"{name} and {reference} have the losses {pairs}")

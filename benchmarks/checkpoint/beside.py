"""What training loses to a checkpoint that is saved beside it: dsengine's asynchronous save against torch.distributed.checkpoint's
(FSDP2, async_save), each in one process by turns with plain steps and with a synchronous save.

  PYTHON_WITH_TORCH benchmarks/checkpoint/beside.py [--ranks 1] [--layers 20] [--width 1024] [--rows 1024] [--steps 2]
      [--rounds 4] [--repeats 1] [--only ours3,dcp-staged] [--folder DIR] [--build build/release] [--json FILE]

A block is a save and the steps after it, which are enough for the save to end. lost: the call and the steps of a block beyond
the steps of a plain one, in percent of a plain step. call: of that, the call alone. Medians over blocks; files are made durable
by both. peer.py says what the kinds of dcp are. One thread a rank, so that with one rank a core is free for what writes.
"""
import argparse
import json
import statistics

from cases import add_options, megabytes, run_cases

CASES = ["ours0", "ours3", "dcp-thread", "dcp-staged", "dcp-process"]


def lost(blocks, plain):
    """Of each block against the plain one of its round, in plain steps."""
    step = statistics.median(time for block in plain for time in block[1:])
    return [100 * (sum(block) - sum(base)) / step for block, base in zip(blocks, plain)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p, layers=20, rows=1024, rounds=4, repeats=1)
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--only", default=",".join(CASES))
    a = p.parse_args()
    samples = run_cases(a, CASES, "--beside", str(a.steps), ranks=a.ranks)
    print(f"{megabytes(a)}, {a.ranks} ranks of one thread, {a.rows} rows each; medians of {a.rounds * a.repeats} blocks")
    print(f"{'case':12s} {'step s':>7s} {'sync: lost':>11s} {'async: lost':>12s} {'from':>7s} {'to':>7s} {'call':>7s}")
    for case, s in samples.items():
        step = statistics.median(time for block in s["plain"] for time in block[1:])
        beside = lost(s["async"], s["plain"])
        call = 100 * statistics.median(block[0] for block in s["async"]) / step
        print(f"{case:12s} {step:7.3f} {statistics.median(lost(s['sync'], s['plain'])):10.1f}% {statistics.median(beside):11.1f}%"
              f" {min(beside):6.1f}% {max(beside):6.1f}% {call:6.1f}%")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(samples, f, indent=1)


if __name__ == "__main__":
    main()

"""Saving and loading checkpoints: dsengine against torch.save, torch.distributed.checkpoint (FSDP2) and DeepSpeed: the same model,
optimizer states, ranks and disk, one case after the other.

  PYTHON_WITH_TORCH_AND_DEEPSPEED benchmarks/checkpoint/compare.py [--layers 20] [--width 1024] [--rounds 3] [--repeats 2]
      [--folder DIR] [--build build/release] [--only ours2,ds2] [--not_durable] [--json FILE]

save: seconds until the call returns and the files are on the disk: dsengine and DCP call fsync themselves, for torch.save and
DeepSpeed it is called behind them. --not_durable: until the call returns, nobody calls fsync. load: with the files in the page
cache. Medians; ratios are to dsengine at the same stage (torch: stage 0, dcp: stage 3).
"""
import argparse
import json
import shutil
import statistics
import tempfile

from cases import add_options, megabytes, run_cases, run_ours

CASES = ["torch", "ours0", "ds0", "ours1", "ds1", "ours2", "ds2", "dcp", "ours3", "ds3"]


def compare(a):
    durable = not a.not_durable
    samples = run_cases(a, CASES, durable=durable)
    print(f"{megabytes(a)}, 2 ranks; medians of {a.rounds * a.repeats}; {'fsync by all' if durable else 'fsync by none'}")
    print(f"{'case':8s} {'save s':>8s} {'load s':>8s}   over dsengine: save, load")
    figures = {case: {key: statistics.median(values) for key, values in lists.items()} for case, lists in samples.items()}
    for case, f in figures.items():
        line = f"{case:8s} {f['save']:8.3f} {f['load']:8.3f}"
        ours = figures.get({"torch": "ours0", "dcp": "ours3"}.get(case, "ours" + case[2:]))
        if ours and not case.startswith("ours"):
            line += "   " + ", ".join(f"{f[key] / ours[key]:.2f}" for key in ("save", "load"))
        print(line)
    return {"durable": durable, "samples": samples}


def compare_ranks(a):
    """Into another number of ranks, in turn with the same one."""
    folders = {ranks: tempfile.mkdtemp(dir=a.folder or a.build) for ranks in (2, 4)}
    loads = {2: [], 4: []}
    try:
        for ranks, folder in folders.items():
            run_ours(a, 2, folder, ranks=ranks)
        for _ in range(2 * a.repeats):
            for ranks, folder in folders.items():
                loads[ranks] += run_ours(a, 2, folder, "--load_only")["load"]
    finally:
        for folder in folders.values():
            shutil.rmtree(folder)
    same, other = statistics.median(loads[2]), statistics.median(loads[4])
    print(f"stage 2, 2 ranks' checkpoint into 2 ranks: {same:.3f} s, 4 ranks': {other:.3f} s, ratio {other / same:.2f}")
    return loads


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p, layers=20, rows=64, rounds=3, repeats=2)
    p.add_argument("--not_durable", action="store_true", help="no fsync by anyone")
    p.add_argument("--only", default=",".join(CASES + ["ranks"]), help="ranks: a load into another number of ranks")
    a = p.parse_args()
    result = compare(a)
    if "ranks" in a.only.split(","):
        result["ranks"] = compare_ranks(a)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()

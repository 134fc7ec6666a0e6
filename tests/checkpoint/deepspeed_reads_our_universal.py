#!/usr/bin/env python3
"""Whether DeepSpeed goes on from what `ds-tool checkpoint convert --format universal` writes.

  deepspeed_reads_our_universal.py BUILD_FOLDER      (of this project: BUILD_FOLDER/bin/ds-tool)

The checkpoints of deepspeed_fixtures/ are converted; jobs of other numbers of ranks and other stages, whose weights begin
elsewhere, load them and train 10 steps more. Their losses must be those of the run that wrote the fixture. Needs
DeepSpeed, as deepspeed_fixtures.py. Exit code 0: all agree.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

import deepspeed_fixtures as fixtures

import deepspeed
import torch

# fixture, stage and ranks that go on, largest difference of losses
RUNS = [
    ("stage1_fp32", 1, 3, 1e-5),
    ("stage2_fp32", 2, 2, 1e-5),
    ("stage3_fp32", 2, 1, 1e-5),
    ("stage2_bf16", 2, 3, 2e-2),
    ("stage2_bf16", 3, 2, 2e-2),
]


def work(rank, ranks, case, stage, save_dir, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    _, _, precision, groups, more = fixtures.CASES[case]
    net = fixtures.Net()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5).add_(0.1)
    parameters = fixtures.groups_of(net) if groups else [p for p in net.parameters() if p.requires_grad]
    config = {**fixtures.config_of(ranks, stage, precision, more), "checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config)
    path, client_state = engine.load_checkpoint(save_dir)
    assert path is not None and client_state["note"] == "a program's own", (path, client_state)
    assert client_state["epochs"] == [1, 2.5, None, True] and engine.global_steps == fixtures.BEFORE
    losses = [fixtures.step(engine, number, rank, ranks)
              for number in range(fixtures.BEFORE, fixtures.BEFORE + fixtures.AFTER)]
    if rank == 0:
        with open(os.path.join(save_dir, "losses.json"), "w") as out:
            json.dump(losses, out)
    torch.distributed.barrier()
    if rank == 0:
        time.sleep(1)  # it serves the store of the others
    os._exit(0)  # gloo's threads do not always end in order


def main():
    tool, failures = os.path.join(sys.argv[1], "bin", "ds-tool"), 0
    for number, (case, stage, ranks, tolerance) in enumerate(RUNS):
        fixture = os.path.join(fixtures.FOLDER, case)
        with tempfile.TemporaryDirectory() as save_dir:
            subprocess.run([tool, "checkpoint", "convert", os.path.join(fixture, "saved"),
                            os.path.join(save_dir, "tag"), "--format", "universal"],
                           check=True, stdout=subprocess.DEVNULL)
            torch.multiprocessing.spawn(work, (ranks, case, stage, save_dir, 29810 + number), nprocs=ranks)
            with open(os.path.join(save_dir, "losses.json")) as f:
                losses = json.load(f)
        with open(os.path.join(fixture, "expected.json")) as f:
            expected = json.load(f)["loss"]
        error = max(abs(a - b) for a, b in zip(losses, expected))
        failures += error > tolerance
        print(f"{case} -> stage {stage}, {ranks} ranks: largest difference of 10 losses {error:.2e}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

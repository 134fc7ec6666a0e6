"""Seconds from typing the command to a trained step over four hosts: ds-launch, torchrun with DDP, deepspeed with ZeRO-2.

  PEERS_PYTHON benchmarks/launch/startup_hosts.py BUILD SCRATCH SOURCE     (scripts/install_peers prints PEERS_PYTHON)

The hosts are network namespaces of this machine, each with an sshd (tests/launcher/hosts.py); one rank on each. ds-launch goes to
them through ssh by itself. torchrun and deepspeed are started on each by an ssh of ours, all at the same time, which leaves out
what their users need for that. As in startup.py, "first step" is the end of the first step on the slowest rank; of dsengine
its whole run, which is longer. The cases run in turn, once uncounted, then three times; medians.
"""
import json
import os
import statistics
import subprocess
import sys
import time

SOURCE = os.path.abspath(sys.argv[3])
sys.path[:0] = [os.path.join(SOURCE, "tests", "launcher"), os.path.join(SOURCE, "benchmarks", "peers")]
import hosts  # noqa: E402
from compare import SIZES, TEXT, optimizer_section, zero_section  # noqa: E402

COUNT = 4
ROUNDS = 3
SIZE = "tiny"
LR = 1e-4
PEER = os.path.join(SOURCE, "benchmarks", "peers", "peer.py")
BIN = os.path.dirname(sys.executable)
NAMES = {"ours": "ds-launch, stage 2", "ddp": "torchrun, DDP", "ds2": "deepspeed, ZeRO-2"}


def run_ours():
    shape = [word for key, value in SIZES[SIZE].items() for word in (f"--{key}", str(value))]
    begin = time.time()
    job = hosts.Job("ours", [hosts.LAUNCH, "--hostfile", f"{hosts.SCRATCH}/hostfile", *hosts.SSH, hosts.GPT,
                             "--deepspeed_config", f"{hosts.SCRATCH}/config.json", *shape, "--steps", "1", "--data", TEXT,
                             "--order", "sequential", "--generate", "0"],
                    {"OMP_NUM_THREADS": "1"})
    job.ends_with(0)
    return time.time() - begin


def run_peer(case, port):
    out = f"{hosts.SCRATCH}/{case}.{port}"
    words = ["env", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu", "GLOO_SOCKET_IFNAME=net0"]
    if case == "ddp":
        start = [f"{BIN}/torchrun", f"--nnodes={COUNT}", "--nproc_per_node=1", "--master_addr=10.77.0.1",
                 f"--master_port={port}", "--node_rank={node}"]
    else:
        start = [sys.executable, f"{BIN}/deepspeed", "--hostfile", f"{hosts.SCRATCH}/hostfile", "--no_ssh", "--no_local_rank",
                 "--master_addr", "10.77.0.1", "--master_port", str(port), "--node_rank", "{node}"]
    command = " ".join([*words, *start, PEER, case, SIZE, "1", "0", str(LR), out])
    begin = time.time()
    started = [subprocess.Popen(hosts.ssh_words(f"node{node}", f"cd {hosts.SCRATCH}; " + command.replace("{node}", str(node))),
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=open(f"{hosts.SCRATCH}/{case}.{node}.log", "w")) for node in range(COUNT)]
    for node, process in enumerate(started):
        hosts.expect(process.wait(120) == 0, f"{case} failed on node{node}: {hosts.SCRATCH}/{case}.{node}.log")
    return max(json.load(open(f"{out}.{rank}"))["first_step_at"] for rank in range(COUNT)) - begin


def test_startup():
    seconds = {case: [] for case in NAMES}
    for round_number in range(ROUNDS + 1):
        for index, case in enumerate(NAMES):
            taken = run_ours() if case == "ours" else run_peer(case, 29700 + 10 * round_number + index)
            if round_number > 0:
                seconds[case].append(taken)
    medians = {case: statistics.median(taken) for case, taken in seconds.items()}
    for case, name in NAMES.items():
        print(f"{name:20s} {medians[case]:6.2f} s   {medians[case] / medians['ours']:5.1f} x   {[round(t, 2) for t in seconds[case]]}",
              flush=True)


def prepare():
    hosts.write("hostfile", "".join(f"{host} slots=1\n" for host in hosts.names_of(COUNT)))
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": optimizer_section(LR),
              "zero_optimization": zero_section("ours2")}
    hosts.write("config.json", json.dumps(config))


if __name__ == "__main__":
    hosts.run(COUNT, prepare, globals())

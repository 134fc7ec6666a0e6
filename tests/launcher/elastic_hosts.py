#!/usr/bin/env python3
"""usage: elastic_hosts.py BUILD SCRATCH SOURCE

Restarts and elastic training over three hosts. One is lost, and the job goes on without it, waits for it, or takes it in
again.
"""
import json
import os
import re
import shutil
import signal
import time

import hosts
from hosts import GPT, LAUNCH, RANK, SCRATCH, SOURCE, SSH, expect, fail, find_program, on, wait_until, write
from metrics_file import losses_of

HOSTFILE = f"{SCRATCH}/hostfile"
ALL = ["--hostfile", HOSTFILE, *SSH]
SAVE_INTERVAL = 3  # steps
SECONDS = 90  # for anything


class Job(hosts.Job):
    """A ds-launch."""

    def __init__(self, name, flags, program, arguments, launch=LAUNCH):
        super().__init__(name, [launch, *flags, "--", program, *arguments], {"OMP_NUM_THREADS": "1"})

    def text(self):
        return self.out() + self.err()

    def waits_for(self, text, count=1):
        wait_until(f"{self.name} says {text!r}",
                   lambda: self.text().count(text) >= count or self.process.poll() is not None, SECONDS)
        expect(self.text().count(text) >= count, f"{self.name} has ended and never said {text!r}")


def test_a_rank_that_fails():
    """All hosts start again; without --min_nodes all of them are needed."""
    job = Job("rank", [*ALL, "--max_restarts", "1", "--master_port", "29511"], RANK,
              ["env", "TORCHELASTIC_RESTART_COUNT", "start", "0", "on", "2", "raise", "9", "start", "0", "pause",
               "env", "WORLD_SIZE"])
    job.ends_with(0)
    job.says("[node1 rank 1] TORCHELASTIC_RESTART_COUNT=1", "[node2 rank 2] WORLD_SIZE=3", "rank 2 on node2 (pid ",
             "restart 1 of 1")


def test_hosts_that_are_missing_or_spare():
    hostfile = write("four", "10.77.0.77 slots=1\nnode0 slots=1\nnode1 slots=1\nnode2 slots=1\n")
    flags = ["--hostfile", hostfile, *SSH, "--connect_timeout", "2"]
    job = Job("missing", [*flags, "--nnodes", "1:2"], RANK, ["env", "WORLD_SIZE", "env", "MASTER_ADDR"])
    job.ends_with(0)
    job.says("3 of 4 hosts are ready; going on without the others:", "10.77.0.77: ssh cannot reach it",
             "host node2 is spare", "[node1 rank 1] WORLD_SIZE=2", "MASTER_ADDR=10.77.0.1")
    job = Job("too_few", [*flags, "--min_nodes", "4"], RANK, ["print", "started"])
    job.ends_with(2)
    job.says("3 of 4 hosts are ready, 4 are needed:")
    expect(job.out() == "", "a rank has started")


def test_a_lost_first_host():
    """Ranks get new numbers, and a new address to meet at."""
    hostfile = write("other_order", "node2 slots=1\nnode1 slots=1\n")
    job = Job("first", ["--hostfile", hostfile, *SSH, "--elastic_training", "--master_port", "29511"],
              RANK,
              ["start", "0", "touch", f"{SCRATCH}/first.pid.%", "start", "0", "pause", "env", "MASTER_ADDR", "env",
               "WORLD_SIZE"])
    job.started(2)
    expect(on("node2", "pkill -9 -o -f '[s]erve_node'")[0] == 0, "no ds-launch runs on node2")
    job.ends_with(0)
    job.says("host node2: the connection to it is gone", "without the hosts that are lost", "MASTER_ADDR=10.77.0.2",
             "WORLD_SIZE=1")


def test_a_spare_host_steps_in():
    hostfile = write("spare", "node2 slots=1\nnode1 slots=1\nnode0 slots=1\n")
    job = Job("spare", ["--hostfile", hostfile, *SSH, "--nnodes", "2:2"], RANK,
              ["start", "0", "touch", f"{SCRATCH}/spare.pid.%", "start", "0", "pause", "env", "MASTER_ADDR", "env",
               "WORLD_SIZE"])
    job.started(2)
    expect(on("node2", "pkill -9 -o -f '[s]erve_node'")[0] == 0, "no ds-launch runs on node2")
    job.ends_with(0)
    job.says("host node0 is spare", "MASTER_ADDR=10.77.0.2", "[node0 rank 1] WORLD_SIZE=2")


def lose_node2(job):
    """Its sshd is gone and with it the connection; until bring_back_node2()."""
    job.started(3)
    sshd = find_program("sshd", "openssh-server")
    on("node2", f"touch {SCRATCH}/no_sshd; (while [ -e {SCRATCH}/no_sshd ]; do sleep 0.1; done; exec {sshd} -D -f "
                f"{SCRATCH}/sshd_config) >/dev/null 2>&1 </dev/null & pkill -9 sshd")
    job.waits_for("host node2: the connection to it is gone")


def bring_back_node2():
    os.remove(f"{SCRATCH}/no_sshd")
    wait_until("sshd of node2", lambda: on("node2", "true")[0] == 0)


def test_waiting_for_a_host():
    """Where all hosts are needed, a restart waits for the one that is lost."""
    flags = [*ALL, "--max_restarts", "1", "--connect_timeout", "1"]

    def until_killed(name):
        return ["start", "0", "touch", f"{SCRATCH}/{name}.pid.%", "start", "0", "pause", "env", "WORLD_SIZE"]

    job = Job("waiting", flags, RANK, until_killed("waiting"))
    lose_node2(job)
    job.waits_for("2 of 3 hosts are ready, 3 are needed:")
    time.sleep(1.5)  # it asks again
    bring_back_node2()
    job.ends_with(0)
    job.says("[node2 rank 2] WORLD_SIZE=3")

    job = Job("interrupted", flags, RANK, until_killed("interrupted"))
    lose_node2(job)
    job.waits_for("2 of 3 hosts are ready, 3 are needed:")
    job.process.send_signal(signal.SIGINT)
    job.ends_with(128 + signal.SIGINT)
    bring_back_node2()

    job = Job("in_vain", [*flags, "--join_timeout", "1"], RANK, until_killed("in_vain"))
    lose_node2(job)
    job.ends_with(2)
    job.says("fewer than 3 hosts were ready within 1 s (--join_timeout)")
    bring_back_node2()


# ---- training ---------------------------------------------------------------------------------------------------------

def gpt_arguments(name, steps):
    return ["--deepspeed_config", f"{SCRATCH}/elastic.json", "--data", f"{SOURCE}/tests/parity/data/kjv_1m.bin",
            "--layers", "2", "--hidden", "128", "--seq_len", "128", "--steps", str(steps), "--generate", "0",
            "--metrics", f"{SCRATCH}/{name}.jsonl"]


def losses(name):
    return losses_of(f"{SCRATCH}/{name}.jsonl")


def test_a_host_that_goes_and_comes_back():
    write("elastic.json", json.dumps({
        "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "version": 0.1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2}}))
    saves = f"{SCRATCH}/saves"
    launch = shutil.copy(LAUNCH, f"{SCRATCH}/ds-launch")
    job = Job("elastic", [*ALL, "--min_nodes", "2", "--link_timeout", "3", "--connect_timeout",
                          "2", "--failure_grace", "1", "--master_addr", "10.77.0.1"], GPT,
              [*gpt_arguments("elastic", 10**6), "--save_checkpoint", saves, "--load_checkpoint", saves,
               "--save_interval", str(SAVE_INTERVAL), "--keep_checkpoints", "2"], launch)

    def reaches(step):
        wait_until(f"step {step}", lambda: len(losses("elastic")) >= step or job.process.poll() is not None, SECONDS)
        expect(job.process.poll() is None, "the training has ended")

    reaches(SAVE_INTERVAL + 1)
    hosts.lose_network("node2", "elastic")
    lost = time.monotonic()
    job.waits_for("starting all ranks again, without the hosts that are lost")
    job.waits_for("GPT of ", count=2)
    at_loss = len(losses("elastic"))
    reaches(at_loss + 1)
    print(f"  after {time.monotonic() - lost:.1f} s the training was further than before", flush=True)
    expect(" parameters on 2 x cpu" in job.text(), "the training did not go on with two ranks")
    expect(len(re.findall("^goes on from ", job.text(), re.MULTILINE)) == 1, "it did not go on from a checkpoint")
    reaches(at_loss + 2 * SAVE_INTERVAL)
    os.replace(shutil.copy(LAUNCH, f"{SCRATCH}/ds-launch.new"), launch)  # as an installation does
    open(f"{SCRATCH}/elastic.up", "w").close()
    returned = time.monotonic()
    job.waits_for("host node2 is ready")
    job.waits_for("starting all ranks again, to take in hosts")
    job.waits_for("3 x cpu", count=2)
    print(f"  {time.monotonic() - returned:.1f} s after its network was there again, the host had been taken in", flush=True)
    reaches(len(losses("elastic")) + 2)
    job.process.send_signal(signal.SIGTERM)
    job.ends_with(128 + signal.SIGTERM)
    expect("restart 1 of" not in job.text(), "lost and returned hosts count as failures")

    found = losses("elastic")
    whole = Job("whole", ["--standalone", "--num_procs", "3"], GPT, gpt_arguments("whole", max(found)))
    whole.ends_with(0)
    expected = losses("whole")
    expect(sorted(found) == sorted(expected), "steps are missing")
    apart = max(abs(found[step] - expected[step]) for step in expected)
    print(f"  {len(expected)} steps, losses apart by at most {apart:.1e}", flush=True)
    expect(apart < 5e-6, f"losses are apart by {apart}")


def prepare():
    write("hostfile", "".join(f"{host} slots=1\n" for host in hosts.names_of(3)))


hosts.run(3, prepare, globals())

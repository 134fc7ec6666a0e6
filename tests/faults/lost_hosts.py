#!/usr/bin/env python3
"""usage: lost_hosts.py BUILD SCRATCH SOURCE

A host whose network goes while its ranks are waited for. Three hosts, one rank on each, in a job that nobody supervises,
started by hand; and one rank of three axes, which ds-launch has started. The ranks that are left say who is gone, and end.
"""
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.abspath(sys.argv[3]), "tests", "launcher"))
import hosts  # noqa: E402
from hosts import LAUNCH, SCRATCH, Job, expect, on, wait_until  # noqa: E402

DRILL = f"{hosts.BUILD}/tests/drill_program"
LIMIT = "2"  # seconds
ENDED_BY_WATCH = 124


def command(name, node, rank_that_hangs, master):
    flags = ["--no_ssh", "--num_nodes", "3", "--num_procs", "1", "--node_rank", str(node), "--master_addr", master,
             "--master_port", "29611", "--failure_grace", "1"]
    return ["env", "OMP_NUM_THREADS=1", f"DS_FLIGHT_FOLDER={SCRATCH}/{name}.flight", LAUNCH, *flags, DRILL, "auto", LIMIT,
            "hang", str(rank_that_hangs)]


def lose(name, lost):
    """The job of three hosts, one of which hangs and then loses its network. Returns what each of the others said."""
    master = "10.77.0.1"
    others = []
    for node in (1, 2):
        words = " ".join(command(name, node, lost, master))
        others.append(subprocess.Popen(hosts.ssh_words(f"node{node}", f"cd {SCRATCH}; {words} >{name}.{node} 2>&1"),
                                       stdin=subprocess.DEVNULL))
    job = Job(name, command(name, 0, lost, master))
    wait_until("training begins", lambda: "plan:" in job.out() + job.err() or job.process.poll() is not None)
    time.sleep(0.7)  # it is in the step in which it hangs by then
    hosts.lose_network(f"node{lost}", name)
    return job, others


def said(name, node):
    with open(f"{SCRATCH}/{name}.{node}") as file:
        return file.read()


def bring_back(name, job, others):
    open(f"{SCRATCH}/{name}.up", "w").close()
    job.process.terminate()
    job.wait()
    for other in others:
        other.kill()
    for node in (1, 2):
        on(f"node{node}", "pkill -9 drill_program")


def test_a_lost_host():
    job, others = lose("lost", 2)
    code = job.wait(30)
    expect(code == ENDED_BY_WATCH, f"rank 0 should end with {ENDED_BY_WATCH}, found {code}")
    job.says("wait in all_reduce 'metrics' (Float[5], sum, number ", " of group world, step 3); rank 2 (node2, pid ",
             "has not entered it: it gives no sign of life for ", "its host or its network may be gone")
    bring_back("lost", job, others)


def test_a_lost_first_host():
    """With it goes the store; each of the others speaks for itself."""
    job, others = lose("first", 0)
    for node in (1, 2):
        wait_until(f"node{node} ends", lambda: "rank 0 (node0, pid " in said("first", node))
        text = said("first", node)
        expect(f"rank {node} waits in all_reduce 'metrics'" in text, f"node{node}: {text}")
        expect("has not answered for " in text or "gives no sign of life" in text, f"node{node}: {text}")
        wait_until(f"ds-launch of node{node} ends", lambda: f"exit code {ENDED_BY_WATCH}" in said("first", node))
    bring_back("first", job, others)


def test_a_lost_rank_of_three_axes():
    """Of 2 x 2 x 2 ranks the last one has a host of its own, which loses its network in the middle of a batch."""
    hostfile = hosts.write("three_axes.hosts", "node0 slots=7\nnode1 slots=1\n")
    job = Job("three_axes", ["env", "OMP_NUM_THREADS=1", f"DS_FLIGHT_FOLDER={SCRATCH}/three_axes.flight", LAUNCH, "--hostfile",
                             hostfile, *hosts.SSH, "--failure_grace", "1", DRILL, "auto", LIMIT, "hang", "7", "2", "2"])
    wait_until("training begins", lambda: "plan:" in job.out() + job.err() or job.process.poll() is not None)
    time.sleep(1.5)  # the last stage is in the batch in which it hangs by then
    hosts.lose_network("node1", "three_axes")
    code = job.wait(60)
    expect(code in (1, ENDED_BY_WATCH), f"by a verdict of the ranks it should end with 1 or {ENDED_BY_WATCH}, found {code}")
    job.says("rank 7 (node1, pid ", "; pipe 1, data 1, tensor 1) has not entered it: it gives no sign of life for ",
             "its host or its network may be gone")
    expect("trained" not in job.out(), "it should end before the last step")
    open(f"{SCRATCH}/three_axes.up", "w").close()
    hosts.expect_nobody_left(job, ["node0", "node1"], "[d]rill_program")


if __name__ == "__main__":
    hosts.run(3, lambda: None, globals())

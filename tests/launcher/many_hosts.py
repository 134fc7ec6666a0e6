#!/usr/bin/env python3
"""usage: many_hosts.py BUILD SCRATCH SOURCE

ds-launch over three hosts. The first host starts jobs on all of them and looks what is left there afterwards.
"""
import os
import re
import signal
import subprocess
import sys
import time

import hosts
from hosts import LAUNCH, PORT, RANK, SCRATCH, SSH, SSH_CONFIG, expect, on, wait_until, write

HOSTS = hosts.names_of(3)
OTHER_RANK = f"{SCRATCH}/other_program"
HOSTFILE = f"{SCRATCH}/hostfile"
ALL = ["--hostfile", HOSTFILE, *SSH]


class Job(hosts.Job):
    """A ds-launch."""

    def __init__(self, name, flags, actions, program=RANK, environment=None):
        super().__init__(name, [LAUNCH, *flags, "--", program, *actions], environment)


def pausing(name):
    """Ranks that have a child in a session of its own and wait for ever."""
    return ["daemon", f"{SCRATCH}/{name}.daemon.%", "touch", f"{SCRATCH}/{name}.pid.%", "pause"]


def expect_nobody_left(job):
    hosts.expect_nobody_left(job, HOSTS)


def test_ranks_of_all_hosts():
    job = Job("environment", [*ALL, "--log_level", "debug"],
              [word for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE",
                                 "MASTER_ADDR", "DS_MINE", "NCCL_DEBUG", "FROM_FILE", "SECRET")
               for word in ("env", name)] + ["error", "to standard error"],
              environment={"DS_MINE": "a b'c", "NCCL_DEBUG": "WARN", "SECRET": "x", "HOME": SCRATCH})
    job.ends_with(0)
    lines = job.out().splitlines()
    for rank in range(6):
        prefix = f"[node{rank // 2} rank {rank}] " if rank else ""
        for text in (f"LOCAL_RANK={rank % 2}", "WORLD_SIZE=6", "LOCAL_WORLD_SIZE=2", f"CROSS_RANK={rank // 2}",
                     "CROSS_SIZE=3", "MASTER_ADDR=10.77.0.1", "DS_MINE=a b'c", "NCCL_DEBUG=WARN", "FROM_FILE=1=2",
                     "SECRET=(unset)"):
            expect(prefix + text in lines, f"no line {prefix + text!r}")
    expect("[node2 rank 5] to standard error" in job.err().splitlines(), "standard error is not kept apart")


def test_a_killed_rank():
    job = Job("killed", ALL, pausing("killed"))
    job.started(6)
    with open(f"{SCRATCH}/killed.pid.3") as file:
        expect(on("node1", f"kill -9 {file.read()}")[0] == 0, "rank 3 is not on node1")
    job.ends_with(128 + signal.SIGKILL)
    job.says("ds-launch: rank 3 on node1 (pid ", "failed: killed by SIGKILL", "ending the ranks on node0, node2")
    expect_nobody_left(job)


def test_an_exit_code():
    job = Job("code", ALL, ["print", "bye %", "on", "4", "exit", "7", "pause"])
    job.ends_with(7)
    job.says("ds-launch: rank 4 on node2 (pid ", "failed: exit code 7", "  | bye 4")
    expect_nobody_left(job)


def test_flight_records():
    """All hosts call the folder of the records alike; the report names the one of the rank that failed."""
    records = f"{SCRATCH}/records"
    record = "folder=$DS_FLIGHT_FOLDER/$DS_FLIGHT_JOB; mkdir -p $folder; touch $folder/rank$RANK.flight"
    job = Job("records", ALL, ["-c", f"{record}; until [ -e $folder/rank4.flight ]; do sleep 0.1; done; "
                                     "[ $RANK = 4 ] && exit 7; exec sleep 60"],
              program="/bin/sh", environment={"DS_FLIGHT_FOLDER": records, "DS_FLIGHT_JOB": "of_another"})
    job.ends_with(7)
    folders = os.listdir(records)
    expect(len(folders) == 1 and folders != ["of_another"], f"the records lie in {folders}")
    job.says(f"what the ranks on node2 did last: ds-tool explain '{records}/{folders[0]}'")
    expect_nobody_left(job)


def test_signals():
    for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
        job = Job(name, ALL, pausing(name))
        job.started(6)
        job.process.send_signal(number)
        job.ends_with(128 + number)
        job.says(f"{name} passed on to all ranks")
        expect("failed" not in job.err(), "ranks that end because they were asked to are no failure")
        expect_nobody_left(job)
    job = Job("saved", ALL, ["catch", str(int(signal.SIGINT)), f"{SCRATCH}/saved.file.%", "touch",
                             f"{SCRATCH}/saved.pid.%", "pause"])
    job.started(6)
    job.process.send_signal(signal.SIGINT)
    job.ends_with(0)
    for rank in range(6):
        expect(os.path.exists(f"{SCRATCH}/saved.file.{rank}"), f"rank {rank} could not save")
    job = Job("twice", ALL, ["ignore", str(int(signal.SIGINT)), *pausing("twice")])
    job.started(6)
    job.process.send_signal(signal.SIGINT)
    wait_until("the first SIGINT is passed on", lambda: "SIGINT passed on" in job.err())
    job.process.send_signal(signal.SIGINT)
    job.ends_with(128 + signal.SIGINT)
    expect_nobody_left(job)


def test_stop_and_continue():
    """While the first ds-launch is stopped, the ranks are too, and its silence is no reason to end them."""
    go = f"{SCRATCH}/stopped.go"
    job = Job("stopped", [*ALL, "--link_timeout", "1"], ["touch", f"{SCRATCH}/stopped.pid.%", "until", go])
    job.started(6)
    states = "ps -o stat= -p $(cat {0}/stopped.pid.{1}),$(cat {0}/stopped.pid.{2})"
    job.process.send_signal(signal.SIGTSTP)
    for host, ranks in (("node1", (2, 3)), ("node2", (4, 5))):
        wait_until(f"ranks of {host} stop",
                   lambda: re.fullmatch(r"(T\S*\s*){2}", on(host, states.format(SCRATCH, *ranks))[1]))
    time.sleep(1.5)
    job.process.send_signal(signal.SIGCONT)
    open(go, "w").close()
    job.ends_with(0)


def test_a_frozen_launcher():
    """Ranks that end because the first ds-launch was silent have not ended well, and it says so when it goes on."""
    job = Job("frozen", [*ALL, "--link_timeout", "1", "--failure_grace", "1"],
              ["catch", str(int(signal.SIGTERM)), f"{SCRATCH}/frozen.ended.%", "touch", f"{SCRATCH}/frozen.pid.%",
               "pause"])
    job.started(6)
    job.process.send_signal(signal.SIGSTOP)
    for rank in range(6):
        wait_until(f"rank {rank} is ended", lambda: os.path.exists(f"{SCRATCH}/frozen.ended.{rank}"))
    job.process.send_signal(signal.SIGCONT)
    job.ends_with(255)
    job.says("the connection to it is gone: ds-launch there heard nothing from this one for 1 s (--link_timeout)")
    expect_nobody_left(job)


def test_a_signal_after_a_failure():
    """The ranks that a failure ends are not started again when someone wants the job to end."""
    go = f"{SCRATCH}/late.go"
    job = Job("late", [*ALL, "--max_restarts", "1", "--failure_grace", "60"],
              ["on", "4", "ignore", str(int(signal.SIGTERM)), "touch", f"{SCRATCH}/late.pid.%",
               "on", "2", "until", f"{SCRATCH}/late.pid.4", "on", "2", "exit", "7", "on", "4", "until", go, "not-on", "4", "pause"])
    wait_until("rank 2 has failed", lambda: "failed: ending the ranks on" in job.err())
    job.process.send_signal(signal.SIGTERM)
    wait_until("it has the signal", lambda: "they are not started again" in job.err())
    open(go, "w").close()
    job.ends_with(7)
    expect("restart 1 of 1" not in job.err(), "it has started again")
    expect_nobody_left(job)


def test_much_output():
    job = Job("output", ALL, ["lines", "20000", "100"])
    job.ends_with(0)
    counts = {}
    for line in job.out().splitlines():
        counts[line] = counts.get(line, 0) + 1
    expected = {(f"[node{rank // 2} rank {rank}] " if rank else "") + "abcdef"[rank] * 100: 20000 for rank in range(6)}
    expect(counts == expected, f"lines are lost or torn: {len(counts)} different ones")
    texts = [letter * 100000 for letter in "abcd"]  # more than a pipe holds
    job = Job("arguments", ALL, [word for text in texts for word in ("on", "5", "print", text)])
    job.ends_with(0)
    expect(job.out() == "".join(f"[node2 rank 5] {text}\n" for text in texts), "long arguments do not come through")


def test_a_killed_launcher():
    job = Job("launcher", ALL, pausing("launcher"))
    job.started(6)
    job.process.kill()
    job.ends_with(-signal.SIGKILL)
    expect_nobody_left(job)


def test_a_killed_ssh():
    job = Job("ssh", ALL, pausing("ssh"))
    job.started(6)
    subprocess.run(["pkill", "-9", "-P", str(job.process.pid), "-f", "node2 exec"], check=True)
    job.ends_with(255)
    job.says("ds-launch: host node2: the connection to it is gone: ssh: killed by SIGKILL")
    expect_nobody_left(job)


def test_a_killed_launcher_of_a_host():
    job = Job("host", ALL, pausing("host"))
    job.started(6)
    expect(on("node1", "pkill -9 -o -f '[s]erve_node'")[0] == 0, "no ds-launch runs on node1")
    expect(job.wait() != 0, "a lost host is no success")
    job.says("ds-launch: host node1: the connection to it is gone")
    expect_nobody_left(job)


def test_a_lost_network():
    job = Job("network", [*ALL, "--link_timeout", "3", "--failure_grace", "1"],
              ["catch", str(int(signal.SIGTERM)), f"{SCRATCH}/network.ended.%", "touch", f"{SCRATCH}/network.pid.%",
               "pause"])
    job.started(6)
    hosts.lose_network("node2", "network")
    job.ends_with(255)
    job.says("ds-launch: host node2: the connection to it is gone")
    for rank in range(6):
        wait_until(f"rank {rank} is ended", lambda: os.path.exists(f"{SCRATCH}/network.ended.{rank}"))
    open(f"{SCRATCH}/network.up", "w").close()
    expect_nobody_left(job)


def test_hosts_that_are_not_ready():
    bad = write("bad_hostfile", "node0 slots=1\n10.77.0.77 slots=1\nnode1 slots=1\nno-such-host.invalid slots=1\n")
    started = f"{SCRATCH}/not_ready"
    on("node1", f"mount --bind {OTHER_RANK} {RANK}")
    job = Job("not_ready", ["--hostfile", bad, *SSH, "--connect_timeout", "2"], ["touch", started])
    job.ends_with(2)
    job.says("not all of the 4 hosts are ready", "  10.77.0.77: ssh cannot reach it", "  no-such-host.invalid: ssh ",
             "the name is unknown here", f"  node1: {RANK} is another file than on node0")
    on("node1", f"umount {RANK}")
    expect(not os.path.exists(started), "a rank has started")

    missing = Job("missing", ALL, [], program="./no_such_program")
    missing.ends_with(127)
    missing.says("  node0: program './no_such_program' was not found", "  node2: program './no_such_program' was")

    expect(on("node2", f"mount --bind {OTHER_RANK} {LAUNCH}")[0] == 0, "mounting")
    job = Job("other_launcher", ALL, ["touch", started])
    job.ends_with(2)
    job.says("  node2: ds-launch did not answer, exit code 0")
    on("node2", f"umount {LAUNCH}")

    port = subprocess.Popen([sys.executable, "-c", "import socket, time\ns = socket.create_server(('', 29501))\n"
                             "print(flush=True)\ntime.sleep(600)"], stdout=subprocess.PIPE)
    port.stdout.readline()
    job = Job("port", [*ALL, "--master_port", "29501"], ["touch", started])
    job.ends_with(2)
    job.says("  node0: --master_port 29501 is in use")
    port.kill()
    key = Job("key", ["--hostfile", HOSTFILE, "--ssh_port", PORT, "--launcher_args",
                      f"-o UserKnownHostsFile=/dev/null -F {SSH_CONFIG} -o StrictHostKeyChecking=yes"], [])
    key.ends_with(2)
    key.says("  node1: ssh cannot reach it: ", "its key is not known")
    expect(not os.path.exists(started), "a rank has started")


def test_a_slow_host():
    freeze = f"pid=$(pgrep -o -f '[s]shd.*-D') && kill -STOP $pid || exit 1; (until [ -e {SCRATCH}/slow.go ]; do sleep 0.1; done; " \
             "kill -CONT $pid) >/dev/null 2>&1 </dev/null &"
    expect(on("node2", freeze)[0] == 0, "the sshd of node2 is not found")
    job = Job("slow", [*ALL, "--connect_timeout", "40"], ["print", "%"])
    wait_until("node2 is named", lambda: re.search("no answer yet from [^:]*node2: ssh has not got in", job.err()))
    open(f"{SCRATCH}/slow.go", "w").close()
    job.ends_with(0)


def test_chosen_hosts():
    job = Job("include", [*ALL, "--include", "node2@node1:1"], ["print", "%", "env", "CROSS_RANK"])
    job.ends_with(0)
    expect(sorted(job.out().split()) == sorted("0 CROSS_RANK=0 [node2 rank 1] 1 [node2 rank 1] CROSS_RANK=1 "
                                               "[node2 rank 2] 2 [node2 rank 2] CROSS_RANK=1".split()), "which ranks?")
    job = Job("one", [*ALL, "--num_nodes", "1", "--num_procs", "1"], ["env", "MASTER_ADDR"])
    job.ends_with(0)
    expect(job.out() == "MASTER_ADDR=127.0.0.1\n", "one host, which is this one, needs no ssh")
    job = Job("forced", [*ALL, "--num_nodes", "1", "--force_multi", "--save_pid"],
              ["on", "0", "env", "MASTER_ADDR"])
    job.ends_with(0)
    expect(job.out() == "MASTER_ADDR=10.77.0.1\n", "--force_multi goes through ssh")
    expect(not os.path.exists(f"/tmp/{job.process.pid}.deepspeed"), "the pid file stays")


def test_by_hand():
    flags = f"--no_ssh --num_nodes 3 --num_procs 2 --master_addr 10.77.0.1 --master_port 29511"
    others = [subprocess.Popen(["ssh", "-F", SSH_CONFIG, "-p", PORT, f"node{node}",
                                f"{LAUNCH} {flags} --node_rank {node} {RANK} env MASTER_PORT env RANK"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) for node in (1, 2)]
    job = Job("by_hand", [*flags.split(), "--node_rank", "0"], ["env", "WORLD_SIZE"])
    job.ends_with(0)
    expect("[node 0 rank 1] WORLD_SIZE=6" in job.out(), "rank 1 does not know the world")
    for node, other in enumerate(others, 1):
        out = other.communicate()[0]
        expect(other.returncode == 0 and f"[node {node} rank {2 * node}] RANK={2 * node}" in out
               and "MASTER_PORT=29511" in out, f"node {node}: {other.returncode}, {out}")


def prepare():
    write("hostfile", "# the first one starts the others\n" + "".join(f"{host} slots=2\n" for host in HOSTS))
    write("other_program", "#!/bin/sh\nexit 0\n", 0o755)
    write(".deepspeed_env", "FROM_FILE=1=2\n")


hosts.run(len(HOSTS), prepare, globals())

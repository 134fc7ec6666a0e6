#!/usr/bin/env python3
"""usage: training_over_hosts.py BUILD SCRATCH SOURCE

The GPT of examples/gpt, trained over four hosts, one rank on each, in every way to start it: ds-launch through ssh, by hand
on each host, through pdsh and the mpirun of Open MPI and of MPICH, and mpirun without ds-launch. The losses are those of
four ranks on one host. Then, how a ds-launch ends that has such a program start the ranks.
"""
import os
import signal
import subprocess

import hosts
from hosts import LAUNCH, RANK, SCRATCH, SSH, SSH_CONFIG, expect, find_program, write
from small_gpt import expect_same_losses, gpt

HOSTS = hosts.names_of(4)
HOSTFILE = f"{SCRATCH}/hostfile"
find_program("pdsh", "pdsh")
OPEN_MPI = find_program("mpirun.openmpi", "openmpi-bin")
MPICH = find_program("mpirun.mpich", "mpich")
SSH_WRAPPER = f"{SCRATCH}/ssh"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PDSH_SSH_ARGS_APPEND": f"-F {SSH_CONFIG}", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
THROUGH = {"pdsh": ["--ssh_port", hosts.PORT],
           "openmpi": ["--launcher_args", f"--mca plm_rsh_agent {SSH_WRAPPER}"],
           "mpich": ["--launcher_args", f"-launcher-exec {SSH_WRAPPER}"]}


class Job(hosts.Job):
    def __init__(self, name, words):
        super().__init__(name, words, ENVIRONMENT)


def through(launcher, program):
    return [LAUNCH, "--hostfile", HOSTFILE, "--launcher", launcher, *THROUGH[launcher], *program]


def train(name, words):
    """Four ranks on four hosts learn what four ranks on one host do."""
    job = Job(name, words)
    job.ends_with(0)
    expect_same_losses(name, "here")
    return job


def test_on_one_host():
    Job("here", [LAUNCH, "--num_procs", "4", *gpt("here")]).ends_with(0)


def test_ssh():
    train("ssh", [LAUNCH, "--hostfile", HOSTFILE, *SSH, *gpt("ssh")]).says("4 ranks of", "on 4 hosts")


def test_by_hand():
    flags = ["--no_ssh", "--num_nodes", "4", "--num_procs", "1", "--master_addr", "10.77.0.1"]
    others = []
    for node, host in enumerate(HOSTS[1:], 1):
        command = " ".join(["OMP_NUM_THREADS=1", LAUNCH, *flags, "--node_rank", str(node), *gpt("by_hand")])
        others.append(subprocess.Popen(hosts.ssh_words(host, command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    train("by_hand", [LAUNCH, *flags, "--node_rank", "0", *gpt("by_hand")])
    for other in others:
        expect(other.wait(30) == 0, "a ds-launch of another host did not end well")


def test_pdsh():
    train("pdsh", through("pdsh", gpt("pdsh")))


def test_open_mpi():
    train("openmpi", through("openmpi", gpt("openmpi")))


def test_mpich():
    train("mpich", through("mpich", gpt("mpich")))


def test_mpirun_alone():
    """No ds-launch at all: the ranks know their place, and where mpirun is, from the variables of Open MPI."""
    train("mpirun", [OPEN_MPI, "--mca", "plm_rsh_agent", SSH_WRAPPER, "--host", ",".join(HOSTS), "-x", "OMP_NUM_THREADS",
                     *gpt("mpirun")])


def test_mpirun_of_mpich_alone():
    """hydra does not say where rank 0 is; without MASTER_ADDR the ranks say so."""
    words = [MPICH, "-launcher-exec", SSH_WRAPPER, "-hosts", ",".join(HOSTS)]
    job = Job("no_master", [*words, *gpt("no_master")])
    expect(job.wait() != 0, "hosts met without an address")
    job.says("MASTER_ADDR is missing", "-genv MASTER_ADDR")
    train("hydra", [*words, "-genv", "MASTER_ADDR", "node0", *gpt("hydra")])


def test_mpirun_from_elsewhere():
    """mpirun on node0, the ranks on the others: rank 0 is where nothing tells the address."""
    words = [OPEN_MPI, "--mca", "plm_rsh_agent", SSH_WRAPPER, "--host", "node1,node2"]
    job = Job("elsewhere", [*words, *gpt("elsewhere")])
    expect(job.wait() != 0, "ranks met on a host that has none")
    job.says("rank 0 runs on another host than mpirun", "-x MASTER_ADDR=")
    Job("elsewhere", [*words, "-x", "MASTER_ADDR=node1", *gpt("elsewhere")]).ends_with(0)


def test_places():
    """Two ranks on a host: numbered host after host, and what the user has set comes through."""
    write("hostfile2", "".join(f"{host} slots=2\n" for host in HOSTS[:3]))
    for launcher, rank in (("openmpi", "OMPI_COMM_WORLD_RANK"), ("mpich", "PMI_RANK")):
        job = Job(f"places_{launcher}", [LAUNCH, "--hostfile", f"{SCRATCH}/hostfile2", "--launcher", launcher,
                                         *THROUGH[launcher], "sh", "-c",
                                         f'echo "$(hostname) ${rank} $MASTER_ADDR $FROM_FILE $(pwd) $0"', "a  'b' %h"])
        job.ends_with(0)
        expected = [f"{HOSTS[rank // 2]} {rank} node0 1 2 {SCRATCH} a  'b' %h" for rank in range(6)]
        expect(sorted(job.out().splitlines()) == sorted(expected), f"{launcher}: {job.out()}")
    job = Job("places_pdsh", [LAUNCH, "--hostfile", f"{SCRATCH}/hostfile2", "--exclude", "node1:0", "--launcher", "pdsh",
                              *THROUGH["pdsh"], "sh", "-c", 'echo "$(hostname) $RANK $LOCAL_RANK $FROM_FILE $(pwd) $0"',
                              "a  'b' %h"])
    job.ends_with(0)
    for host, rank, local in (("node0", 0, 0), ("node0", 1, 1), ("node1", 2, 0), ("node2", 3, 0), ("node2", 4, 1)):
        prefix = f"{host}: " + (f"[{host} rank {rank}] " if rank else "")
        expect(f"{prefix}{host} {rank} {local} 1 2 {SCRATCH} a  'b' %h" in job.out().splitlines(), f"no rank {rank}")


def test_exit_codes():
    for launcher in THROUGH:
        job = Job(f"code_{launcher}", through(launcher, ["sh", "-c", "exit 7"]))
        job.ends_with(7)
        job.says("ended with exit code 7")


def test_nobody_is_left():
    """Whether ds-launch is asked to end or killed."""
    for launcher in THROUGH:
        for number in (signal.SIGTERM, signal.SIGKILL):
            name = f"{launcher}{int(number)}"
            started = f"{SCRATCH}/{name}.started"
            job = Job(name, through(launcher, ["sh", "-c", f"touch {started}.$(hostname); exec {RANK} pause"]))
            for host in HOSTS:
                hosts.wait_until(f"{name} on {host}", lambda: os.path.exists(f"{started}.{host}"))
            job.process.send_signal(number)
            job.ends_with(128 + number if number == signal.SIGTERM else -number)
            hosts.expect_nobody_left(job, HOSTS, "[l]auncher_rank_program|[d]s-launch --node_rank")


def prepare():
    write("hostfile", "".join(f"{host} slots=1\n" for host in HOSTS))
    write("ssh", f'#!/bin/sh\nexec ssh -F {SSH_CONFIG} -p {hosts.PORT} "$@"\n', 0o755)
    write(".deepspeed_env", "FROM_FILE=1 2\n")


hosts.run(len(HOSTS), prepare, globals())

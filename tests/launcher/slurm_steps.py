#!/usr/bin/env python3
"""usage: slurm_steps.py BUILD SCRATCH SOURCE

The GPT of examples/gpt as a step of SLURM on two hosts: by srun alone, by examples/train.sbatch, by ds-launch --launcher slurm,
by a ds-launch on each host, and by mpirun inside a job. SLURM's daemons run on the hosts of the test only, with a key and folders of their own.
"""
import os
import signal
import subprocess

import hosts
from hosts import LAUNCH, SCRATCH, SOURCE, expect, find_program, wait_until, write
from small_gpt import expect_same_losses, gpt

HOSTS = hosts.names_of(2)
PROGRAMS = {name: find_program(name, package)
            for name, package in (("munged", "munge"), ("slurmctld", "slurmctld"), ("slurmd", "slurmd"),
                                  ("srun", "slurm-client"), ("mpirun.openmpi", "openmpi-bin"), ("mpirun.mpich", "mpich"))}
OWN = "/dev/shm"  # the one folder that a host does not share with the others
CONFIG = f"{SCRATCH}/slurm.conf"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SLURM_CONF": CONFIG, "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Job(hosts.Job):
    def __init__(self, name, words):
        super().__init__(name, words, ENVIRONMENT)


def train(name, words):
    """Two ranks on two hosts learn what two ranks on one host do."""
    job = Job(name, words)
    job.ends_with(0)
    expect_same_losses(name, "here")
    return job


def in_job(name, script):
    """The words for a script inside a job of two tasks on two hosts."""
    path = write(f"{name}.sh", "#!/bin/sh\n" + script, 0o755)
    return ["salloc", "-N", "2", "-n", "2", path]


def test_on_one_host():
    Job("here", [LAUNCH, "--num_procs", "2", *gpt("here")]).ends_with(0)


def test_srun():
    train("srun", ["srun", "-N", "2", "-n", "2", *gpt("srun")])


def test_two_tasks_of_a_host():
    train("one_host", ["srun", "-N", "1", "-n", "2", *gpt("one_host")])


def test_the_script_for_sbatch():
    """Its own words ask for more hosts and tasks than there are here."""
    train("batch", ["sbatch", "--wait", "--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1", "-o", f"{SCRATCH}/batch.log",
                    f"{SOURCE}/examples/train.sbatch", *gpt("batch")])
    with open(f"{SCRATCH}/batch.log") as file:
        expect("this job has no secret" not in file.read(), "the ranks of examples/train.sbatch have no secret")


def test_ds_launch():
    train("launched", [LAUNCH, "--launcher", "slurm", "--num_nodes", "2", "--num_procs", "1", *gpt("launched")])
    hostfile = write("hostfile", "".join(f"{host} slots=1\n" for host in HOSTS))
    train("hostfile", [LAUNCH, "--launcher", "slurm", "--hostfile", hostfile, *gpt("hostfile")])
    job = Job("code", [LAUNCH, "--launcher", "slurm", "--num_procs", "2", "sh", "-c",
                       "[ $SLURM_PROCID = 1 ] && exit 7; sleep 600"])
    job.ends_with(128 + signal.SIGTERM)  # srun ends with the highest exit code, here of the task that it ended
    job.says("task 1: Exited with exit code 7", "srun ended with exit code 143")


def test_a_ds_launch_on_each_host():
    train("each", ["srun", "-N", "2", "-n", "2", "sh", "-c",
                   f"exec {LAUNCH} --node_rank $SLURM_NODEID --num_nodes 2 --num_procs 1 --master_addr node0 " +
                   " ".join(gpt("each"))])


def test_what_is_no_step_is_one_process():
    """The shell of salloc and the script of sbatch, though SLURM_NTASKS is 2 there."""
    job = Job("shell", in_job("shell", " ".join(gpt("shell"))))
    job.ends_with(0)
    job.says("on 1 x cpu")
    Job("script", ["sbatch", "--wait", "-N", "2", "-n", "2", "-o", f"{SCRATCH}/script.log", f"{SCRATCH}/shell.sh"]).ends_with(0)
    with open(f"{SCRATCH}/script.log") as file:
        expect("on 1 x cpu" in file.read(), "a script of sbatch takes itself for one of two ranks")


def test_steps_at_once():
    """They run on the same hosts and do not meet on one port."""
    steps = "".join(f"srun --overlap -N 2 -n 2 {' '.join(gpt(name))} &\n{name}=$!\n" for name in ("left", "right"))
    Job("steps", in_job("steps", f"{steps}wait $left && wait $right")).ends_with(0)
    for name in ("left", "right"):
        expect_same_losses(name, "here")


def test_mpirun_inside_a_job():
    """Its daemons are tasks of SLURM, and the ranks see both."""
    train("openmpi", in_job("openmpi", f"mpirun.openmpi --map-by node -n 2 {' '.join(gpt('openmpi'))}"))
    train("mpich", in_job("mpich", f"mpirun.mpich -ppn 1 -genv MASTER_ADDR node0 -n 2 {' '.join(gpt('mpich'))}"))


def start_daemons():
    write("munge.key", os.urandom(64).hex())
    write("slurm.conf", f"""ClusterName=hosts
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={OWN}/munge.socket
StateSaveLocation={OWN}/state
SlurmdSpoolDir={OWN}/spool
SlurmctldPidFile={OWN}/slurmctld.pid
SlurmdPidFile={OWN}/slurmd.pid
SlurmctldLogFile={SCRATCH}/slurmctld.log
SlurmdLogFile={SCRATCH}/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=node[0-1] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
""")
    start = (f"mkdir -p {OWN}/state {OWN}/spool && {PROGRAMS['munged']} --force --key-file {SCRATCH}/munge.key "
             f"--socket {OWN}/munge.socket --pid-file {OWN}/munge.pid --log-file {OWN}/munge.log --seed-file {OWN}/seed "
             f"&& export SLURM_CONF={CONFIG} && ")
    on_node = {"node0": f"{PROGRAMS['slurmctld']} && {PROGRAMS['slurmd']}", "node1": PROGRAMS["slurmd"]}
    for host in HOSTS:
        done = subprocess.run(hosts.ssh_words(host, f"({start} {on_node[host]}) 2>&1 </dev/null"), capture_output=True,
                              text=True)
        expect(done.returncode == 0, f"the daemons of {host} do not start: {done.stdout}")
    idle = lambda: subprocess.run(["sinfo", "-h", "-o", "%D %t"], capture_output=True, text=True,
                                  env={**os.environ, **ENVIRONMENT}).stdout.split() == ["2", "idle"]
    wait_until("both nodes are idle", idle)


hosts.run(len(HOSTS), lambda: None, {"test_daemons": start_daemons, **globals()})

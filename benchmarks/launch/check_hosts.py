"""Seconds until 64 hosts are asked, ready or not, and the CPU seconds of that on the first host alone.

  python benchmarks/launch/check_hosts.py BUILD SCRATCH SOURCE

The hosts are network namespaces of this machine, each with an sshd (tests/launcher/hosts.py), so their work, which 64 machines would
do at the same time, is on this one's cores too. The first host's own part is what ds-launch and its ssh take.
"""
import os
import resource
import statistics
import sys
import time

SOURCE = os.path.abspath(sys.argv[3])
sys.path[:0] = [os.path.join(SOURCE, "tests", "launcher")]
import hosts  # noqa: E402

COUNT = 64
ROUNDS = 3


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(name, exit_code):
    cpu, begin = cpu_seconds(), time.monotonic()
    job = hosts.Job(name, [hosts.LAUNCH, "--hostfile", f"{hosts.SCRATCH}/hostfile", *hosts.SSH, "--connect_timeout", "30",
                           hosts.RANK])
    job.ends_with(exit_code)
    return job, time.monotonic() - begin, cpu_seconds() - cpu


def report(what, runs):
    print(f"{what}: {statistics.median(seconds for _, seconds, _ in runs):.2f} s, "
          f"{statistics.median(cpu for _, _, cpu in runs):.2f} s of CPU on the first host, {os.cpu_count()} cores", flush=True)


def test_hosts_that_are_ready():
    report(f"{COUNT} hosts that start a rank each, which ends at once",
           [start(f"ready{number}", 0) for number in range(ROUNDS)])


def test_a_host_that_is_not():
    hosts.on("node7", f"mount --bind /bin/true {hosts.RANK}")
    runs = [start(f"other{number}", 2) for number in range(ROUNDS)]
    for job, _, _ in runs:
        job.says(f"  node7: {hosts.RANK} is another file than on node0")
    report(f"{COUNT} hosts, one with another program, which is named", runs)


def prepare():
    hosts.write("hostfile", "".join(f"{host} slots=1\n" for host in hosts.names_of(COUNT)))


hosts.run(COUNT, prepare, globals())

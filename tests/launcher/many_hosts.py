#!/usr/bin/env python3
"""usage: many_hosts.py BUILD SCRATCH SOURCE

ds-launch over three hosts, which are network namespaces of this machine (scripts/slow_network), each with a name, process
ids, mounts and an sshd of its own. The first host starts jobs on all of them and looks what is left there afterwards.
Fails where namespaces or sshd are missing; needs root, for sshd, or sudo without a password.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time

BUILD, SCRATCH, SOURCE = (os.path.abspath(path) for path in sys.argv[1:4])
LAUNCH = f"{BUILD}/bin/ds-launch"
RANK = f"{BUILD}/tests/launcher_rank_program"
OTHER_RANK = f"{SCRATCH}/other_program"
GPT = f"{BUILD}/bin/gpt"
HOSTS = ["node0", "node1", "node2"]
PORT = "2222"
SSH_CONFIG = f"{SCRATCH}/ssh_config"
HOSTFILE = f"{SCRATCH}/hostfile"


# ---- before the hosts are there ---------------------------------------------------------------------------------------

def write(name, text, mode=0o600):
    path = os.path.join(SCRATCH, name)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)
    return path


def outside():
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ["PATH"])
    if not sshd:
        sys.exit("FAILED: no sshd: install the Debian package openssh-server")
    if os.geteuid() != 0:
        if not shutil.which("sudo") or subprocess.run(["sudo", "-n", "true"], stderr=subprocess.DEVNULL).returncode != 0:
            sys.exit("FAILED: sshd needs root to let someone in; run as root, or let sudo ask for no password")
        os.execvp("sudo", ["sudo", "-n", "env", f"PATH={os.environ['PATH']}", "OMP_NUM_THREADS=1", sys.executable, *sys.argv])
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os.makedirs(SCRATCH)
    os.makedirs("/run/sshd", exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{SCRATCH}/{name}"], check=True)
    shutil.copy(f"{SCRATCH}/user_key.pub", f"{SCRATCH}/authorized_keys")
    write("sshd_config", f"""Port {PORT}
HostKey {SCRATCH}/host_key
AuthorizedKeysFile {SCRATCH}/authorized_keys
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
""")
    write("ssh_config", f"""Host *
  IdentityFile {SCRATCH}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {SCRATCH}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
""")
    write("hostfile", "# the first one starts the others\n" + "".join(f"{host} slots=2\n" for host in HOSTS))
    write("other_program", "#!/bin/sh\nexit 0\n", 0o755)
    status = subprocess.run([f"{SOURCE}/scripts/slow_network", "--nodes", str(len(HOSTS)), "--ds_launch", LAUNCH, "--",
                             sys.executable, __file__, BUILD, SCRATCH, SOURCE]).returncode
    if "SUDO_UID" in os.environ:
        shutil.rmtree(SCRATCH)  # else the user could not remove it
    sys.exit(status)


# ---- on a host --------------------------------------------------------------------------------------------------------

def start_sshd():
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ["PATH"])
    return subprocess.Popen([sshd, "-D", "-f", f"{SCRATCH}/sshd_config", "-E", f"{SCRATCH}/sshd.{os.uname().nodename}.log"])


def wait_until(what, condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            fail(f"waited {seconds} s in vain: {what}")
        time.sleep(0.02)


def other_host():
    sshd = start_sshd()
    while not os.path.exists(f"{SCRATCH}/done"):
        time.sleep(0.1)
    sshd.kill()


# ---- on the first host ------------------------------------------------------------------------------------------------

def fail(text):
    print(f"FAILED: {text}", file=sys.stderr)
    for job in Job.all:
        print(f"---- {job.name}: {' '.join(job.words)}\n{job.out()}{job.err()}", file=sys.stderr)
    sys.exit(1)


def expect(condition, text):
    if not condition:
        fail(text)


def on(host, command):
    done = subprocess.run(["ssh", "-F", SSH_CONFIG, "-p", PORT, host, command], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    return done.returncode, done.stdout


class Job:
    all = []

    def __init__(self, name, flags, actions, program=RANK, environment=None):
        self.name = name
        self.words = [LAUNCH, *flags, "--", program, *actions]
        clean = {key: value for key, value in os.environ.items()
                 if not re.fullmatch(r".*RANK|.*_SIZE|MASTER_.*|DS_LAUNCH_ID|OMP_NUM_THREADS", key)}
        with open(f"{SCRATCH}/{name}.out", "w") as out, open(f"{SCRATCH}/{name}.err", "w") as err:
            self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=SCRATCH,
                                            env={**clean, **(environment or {})})
        Job.all = [self]

    def read(self, kind):
        with open(f"{SCRATCH}/{self.name}.{kind}") as file:
            return file.read()

    def out(self):
        return self.read("out")

    def err(self):
        return self.read("err")

    def wait(self, seconds=60):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            fail(f"{self.name} did not end within {seconds} s")

    def ends_with(self, code):
        found = self.wait()
        expect(found == code, f"{self.name}: expected exit code {code}, found {found}")

    def says(self, *texts):
        for text in texts:
            expect(text in self.out() + self.err(), f"{self.name}: does not say {text!r}")

    def started(self, ranks):
        for rank in range(ranks):
            wait_until(f"rank {rank} of {self.name}", lambda: os.path.exists(f"{SCRATCH}/{self.name}.pid.{rank}")
                       or self.process.poll() is not None)
            expect(self.process.poll() is None, f"{self.name} ended early")


SSH = ["--ssh_port", PORT, "--launcher_args", f"-F '{SSH_CONFIG}'"]
ALL = ["--hostfile", HOSTFILE, *SSH]


def pausing(name):
    """Ranks that have a child in a session of its own and wait for ever."""
    return ["daemon", f"{SCRATCH}/{name}.daemon.%", "touch", f"{SCRATCH}/{name}.pid.%", "pause"]


def expect_nobody_left(job):
    looks = [subprocess.Popen(["ssh", "-F", SSH_CONFIG, "-p", PORT, host,
                               "for i in $(seq 200); do pgrep -fl '[l]auncher_rank_program|[s]erve_node' || exit 0; "
                               "sleep 0.1; done; exit 1"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
             for host in HOSTS]
    for host, look in zip(HOSTS, looks):
        seen = look.communicate()[0].splitlines()
        expect(look.returncode == 0, f"{job.name}: processes are left on {host}: {seen[-3:]}")


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
    down = f"PATH=$PATH:/sbin; (sleep 0.3; ip link set net0 down; until [ -e {SCRATCH}/network.up ]; do sleep 0.1; done; " \
           "ip link set net0 up) >/dev/null 2>&1 </dev/null &"
    expect(on("node2", down)[0] == 0, "the network of node2 stays up")
    job.ends_with(255)
    job.says("ds-launch: host node2: the connection to it is gone")
    for rank in range(6):
        wait_until(f"rank {rank} is ended", lambda: os.path.exists(f"{SCRATCH}/network.ended.{rank}"))
    open(f"{SCRATCH}/network.up", "w").close()
    expect_nobody_left(job)


def test_hosts_that_are_not_ready():
    hosts = write("bad_hostfile", "node0 slots=1\n10.77.0.77 slots=1\nnode1 slots=1\nno-such-host.invalid slots=1\n")
    started = f"{SCRATCH}/not_ready"
    on("node1", f"mount --bind {OTHER_RANK} {RANK}")
    job = Job("not_ready", ["--hostfile", hosts, *SSH, "--connect_timeout", "2"], ["touch", started])
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


def test_training():
    if not os.path.exists(GPT):
        print("no example gpt is built: training over the hosts is not looked at")
        return
    for name, flags in (("gpt", [*ALL, "--num_nodes", "2", "--num_procs", "1"]), ("gpt_here", ["--num_procs", "2"])):
        job = Job(name, flags, ["--deepspeed_config", f"{SOURCE}/configs/zero2.json", "--data",
                                f"{SOURCE}/tests/parity/data/kjv_1m.bin", "--layers", "1", "--hidden", "32",
                                "--seq_len", "32", "--steps", "3", "--generate", "0", "--metrics",
                                f"{SCRATCH}/{name}.jsonl"], program=GPT, environment={"OMP_NUM_THREADS": "1"})
        job.ends_with(0)
        if name == "gpt":
            job.says("2 ranks on 2 hosts")
    losses = [re.findall(r'"loss": ?([0-9.]+)', open(f"{SCRATCH}/{name}.jsonl").read()) for name in ("gpt", "gpt_here")]
    expect(len(losses[0]) >= 3 and [l[:6] for l in losses[0]] == [l[:6] for l in losses[1]], f"losses {losses}")


def first_host():
    write(".deepspeed_env", "FROM_FILE=1=2\n")
    sshd = start_sshd()
    for host in HOSTS:
        wait_until(f"sshd of {host}", lambda: on(host, "true")[0] == 0)
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            start = time.monotonic()
            test()
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    sshd.kill()


if "CROSS_RANK" not in os.environ or "DS_LAUNCH_ID" not in os.environ:
    outside()
elif os.environ["CROSS_RANK"] == "0":
    try:
        first_host()
    finally:
        open(f"{SCRATCH}/done", "w").close()
else:
    other_host()

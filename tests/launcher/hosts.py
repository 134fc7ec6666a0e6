"""Hosts for tests of ds-launch: network namespaces of this machine (scripts/slow_network), each with a name, process ids,
mounts and an sshd of its own.

A test is a script that is started as `SCRIPT BUILD SCRATCH SOURCE` and ends with run(count, prepare, tests): that makes the hosts
and starts the script again on each of them; on the first one it runs the tests. Fails where namespaces or sshd are
missing; needs root, for sshd, or sudo without a password.
"""
import os
import re
import shutil
import subprocess
import sys
import time

BUILD, SCRATCH, SOURCE = (os.path.abspath(path) for path in sys.argv[1:4])
LAUNCH = f"{BUILD}/bin/ds-launch"
RANK = f"{BUILD}/tests/launcher_rank_program"
GPT = f"{BUILD}/bin/gpt"
PORT = "2222"
SSH_CONFIG = f"{SCRATCH}/ssh_config"
SSH = ["--ssh_port", PORT, "--launcher_args", f"-F '{SSH_CONFIG}'"]


# ---- before the hosts are there ---------------------------------------------------------------------------------------

def write(name, text, mode=0o600):
    path = os.path.join(SCRATCH, name)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)
    return path


def find_program(name, package):
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin")
    if not found:
        sys.exit(f"FAILED: no {name}: install the Debian package {package}")
    return found


def become_root():
    if os.geteuid() == 0:
        return
    if not shutil.which("sudo") or subprocess.run(["sudo", "-n", "true"], stderr=subprocess.DEVNULL).returncode != 0:
        sys.exit("FAILED: sshd needs root to let someone in; run as root, or let sudo ask for no password")
    os.execvp("sudo", ["sudo", "-n", "env", f"PATH={os.environ['PATH']}", "OMP_NUM_THREADS=1", sys.executable, *sys.argv])


def make_hosts(count):
    find_program("sshd", "openssh-server")
    become_root()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os.makedirs(SCRATCH)
    os.makedirs("/run/sshd", exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{SCRATCH}/{name}"], check=True)
    shutil.copy(f"{SCRATCH}/user_key.pub", f"{SCRATCH}/authorized_keys")
    # A home of their own: what ~/.bashrc of the user who runs the test does (a version manager that waits for its lock, for
    # example) would be part of every command over ssh.
    os.makedirs(f"{SCRATCH}/home")
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
SetEnv HOME={SCRATCH}/home
""")
    write("ssh_config", f"""Host *
  IdentityFile {SCRATCH}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {SCRATCH}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
""")
    status = subprocess.run([f"{SOURCE}/scripts/slow_network", "--nodes", str(count), "--ds_launch", LAUNCH, "--",
                             sys.executable, *sys.argv]).returncode
    if "SUDO_UID" in os.environ:
        shutil.rmtree(SCRATCH)  # else the user could not remove it
    sys.exit(status)


# ---- on a host --------------------------------------------------------------------------------------------------------

def start_sshd():
    return subprocess.Popen([find_program("sshd", "openssh-server"), "-D", "-f", f"{SCRATCH}/sshd_config", "-E",
                             f"{SCRATCH}/sshd.{os.uname().nodename}.log"])


def wait_until(what, condition, seconds=60):
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


def ssh_words(host, command):
    return ["ssh", "-F", SSH_CONFIG, "-p", PORT, host, command]


def on(host, command):
    done = subprocess.run(ssh_words(host, command), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, done.stdout


def lose_network(host, name):
    """Takes its link down, until SCRATCH/NAME.up is there; not before the ssh that asks for it has returned."""
    wait = lambda file: f"until [ -e {SCRATCH}/{name}.{file} ]; do sleep 0.05; done"  # noqa: E731
    done = on(host, f"PATH=$PATH:/sbin; ({wait('down')}; ip link set net0 down; touch {SCRATCH}/{name}.is_down; {wait('up')}; "
                    "ip link set net0 up) >/dev/null 2>&1 </dev/null &")
    expect(done[0] == 0, f"the network of {host} stays up")
    open(f"{SCRATCH}/{name}.down", "w").close()
    wait_until(f"the network of {host} is down", lambda: os.path.exists(f"{SCRATCH}/{name}.is_down"))


class Job:
    """A command on the first host, as from a shell that no launcher has started."""
    all = []  # for messages: the last one

    def __init__(self, name, words, environment=None):
        self.name = name
        self.words = words
        clean = {key: value for key, value in os.environ.items()
                 if not re.fullmatch(r".*RANK|.*_SIZE|MASTER_.*|DS_LAUNCH_ID|DS_FLIGHT_JOB|DS_JOB_SECRET|OMP_NUM_THREADS", key)}
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


def expect_nobody_left(job, hosts, pattern="[l]auncher_rank_program|[s]erve_node"):
    looks = [subprocess.Popen(ssh_words(host, f"for i in $(seq 200); do pgrep -fl '{pattern}' || exit 0; sleep 0.1; done; "
                                              "exit 1"),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
             for host in hosts]
    for host, look in zip(hosts, looks):
        seen = look.communicate()[0].splitlines()
        expect(look.returncode == 0, f"{job.name}: processes are left on {host}: {seen[-3:]}")


def names_of(count):
    return [f"node{host}" for host in range(count)]


def first_host(count, prepare, tests):
    prepare()
    sshd = start_sshd()
    for host in names_of(count):
        wait_until(f"sshd of {host}", lambda: on(host, "true")[0] == 0)
    for name, test in list(tests.items()):
        if name.startswith("test_"):
            start = time.monotonic()
            test()
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    sshd.kill()


def run(count, prepare, tests):
    """prepare() makes files. `tests`: globals() of the script; those that start with test_ are run on the first host."""
    if "CROSS_RANK" not in os.environ or "DS_LAUNCH_ID" not in os.environ:
        make_hosts(count)
    elif os.environ["CROSS_RANK"] == "0":
        try:
            first_host(count, prepare, tests)
        finally:
            open(f"{SCRATCH}/done", "w").close()
    else:
        other_host()

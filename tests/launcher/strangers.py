#!/usr/bin/env python3
"""usage: strangers.py BUILD SCRATCH SOURCE

Jobs of two ranks on this machine, through shared memory and through gloo, and strangers: they connect to every port that its processes listen on, say nothing,
noise, HTTP, or what LibTorch's store understands, and one is a rank of ours without the job's secret. The losses are those
of a job that nobody disturbs, its log names who came, and its ports are open to this machine alone.
"""
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time

from metrics_file import losses_of

BUILD, SCRATCH, SOURCE = (os.path.abspath(path) for path in sys.argv[1:4])
LAUNCH, GPT = f"{BUILD}/bin/ds-launch", f"{BUILD}/bin/gpt"
STEPS = 1500
LIMIT = 120  # seconds, for whatever is waited for
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


def fail(why):
    sys.exit(f"strangers.py: {why}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(backend):
    with open(f"{SOURCE}/configs/zero2.json") as file:
        config = json.load(file)
    with open(f"{SCRATCH}/{backend}.json", "w") as file:
        json.dump({**config, "communication_backend": backend}, file)


def gpt(name, backend):
    return [GPT, "--deepspeed_config", f"{SCRATCH}/{backend}.json", "--data", f"{SOURCE}/tests/parity/data/kjv_1m.bin",
            "--layers", "1", "--hidden", "32", "--seq_len", "32", "--steps", str(STEPS), "--generate", "0", "--metrics",
            f"{SCRATCH}/{name}.jsonl"]


def start(name, port, backend):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DS_")}
    environment["OMP_NUM_THREADS"] = "1"
    with open(f"{SCRATCH}/{name}.log", "w") as log:
        return subprocess.Popen([LAUNCH, "--num_procs", "2", "--master_port", str(port), *gpt(name, backend)], stdout=log,
                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)


def log_of(name):
    with open(f"{SCRATCH}/{name}.log", errors="replace") as log:
        return log.read()


def finish(name, job):
    try:
        code = job.wait(LIMIT)
    except subprocess.TimeoutExpired:
        job.kill()
        fail(f"{name} did not end within {LIMIT} s:\n{log_of(name)}")
    if code != 0:
        fail(f"{name} ended with {code}:\n{log_of(name)}")
    return list(losses_of(f"{SCRATCH}/{name}.jsonl").values())


def children_of(pid):
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            for child in children.read().split():
                found += children_of(int(child))
    return found


def listening_ports(job):
    """(port, address as /proc has it) of all processes of the job."""
    inodes = set()
    for pid in children_of(job.pid):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    address, port = words[1].split(":")
                    ports.append((int(port, 16), address))
    return ports


def words_of_strangers():
    noise = random.Random(1)
    key = b"rendezvous/arrival/1"
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: worker-0\r\n\r\n"
    for _ in range(10):
        yield noise.randbytes(noise.choice([1, 7, 8, 100, 5000]))
    yield b"\xff" * 64
    yield struct.pack("<BI", 0, 0x3C85F7CE)  # a client of the store, which then says nothing
    yield struct.pack("<BI", 0, 0x3C85F7CE) + noise.randbytes(300)
    yield struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 1, len(key)) + key + struct.pack("<Q", 1 << 62)


def visit(port, words):
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as visitor:
            visitor.sendall(words)
            visitor.settimeout(0.05)
            visitor.recv(100)
    except OSError:
        pass  # refused, reset or silent: all the same to the job


def come_as_rank(port):
    environment = dict(os.environ, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    environment.pop("DS_JOB_SECRET", None)
    process = subprocess.Popen(gpt("stranger", "auto"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out, _ = process.communicate(timeout=LIMIT)
    if process.returncode == 0 or "DS_JOB_SECRET" not in out:
        fail(f"a rank without the secret ended with {process.returncode}: {out}")
    return process.pid


def disturb(backend):
    write_config(backend)
    undisturbed, disturbed = f"{backend}_undisturbed", f"{backend}_disturbed"
    expected = finish(undisturbed, start(undisturbed, free_port(), backend))
    port = free_port()
    metrics = f"{SCRATCH}/{disturbed}.jsonl"
    if os.path.exists(metrics):
        os.remove(metrics)
    job = start(disturbed, port, backend)
    end = time.monotonic() + LIMIT
    while not (os.path.exists(metrics) and os.path.getsize(metrics) > 0):
        if job.poll() is not None or time.monotonic() > end:
            fail(f"the job does not train:\n{log_of(disturbed)}")
        time.sleep(0.05)
    ports = listening_ports(job)
    if port not in [found for found, _ in ports]:
        fail(f"nobody listens on {port}: {ports}")
    for found, address in ports:
        if address not in LOOPBACK:
            fail(f"port {found} is open to {address}, expected this machine alone")
    stranger = come_as_rank(port)
    for found, _ in ports:
        for words in words_of_strangers():
            visit(found, words)
    if job.poll() is not None:
        fail(f"the job had ended before the strangers: it needs more than {STEPS} steps")
    losses = finish(disturbed, job)
    if losses != expected:
        fail(f"the losses are others than those of an undisturbed job: {losses[-3:]} and {expected[-3:]}")
    said = [line for line in log_of(disturbed).splitlines() if "came to this job without its secret" in line]
    if len(said) != 1 or "127.0.0.1" not in said[0] or f"pid {stranger}" not in said[0]:
        fail(f"expected one line that names the stranger, found {said}:\n{log_of(disturbed)}")
    print(f"{backend}: {len(ports)} ports, {len(losses)} losses alike; {said[0]}")


os.makedirs(SCRATCH, exist_ok=True)
for name_of_backend in ("auto", "gloo"):
    disturb(name_of_backend)

#!/usr/bin/env python3
"""A rank that needs more memory than its control group may take: ds-launch says that the kernel killed it, and why.

usage: out_of_memory.py BUILD_FOLDER

Runs ds-launch in a control group of its own, with a real limit. Where none can be made (no root, no writable cgroup
file system) it ends with 77, which ctest shows as skipped.
"""
import os
import pathlib
import subprocess
import sys
import time

LIMIT_MIB = 256
SKIPPED = 77


def own_group():
    """The folder of this process's memory control group, and the name of the limit in it."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
    path = pathlib.Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
    return pathlib.Path("/sys/fs/cgroup" + path), "memory.max"


def make_group():
    parent, limit = own_group()
    # Of version 2, a group with processes has no groups with controllers below it: beside it there may be.
    for folder in (parent, parent.parent):
        group = folder / f"dsengine-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reason = error
            continue
        try:
            (group / limit).write_text(str(LIMIT_MIB << 20))
            return group
        except OSError as error:
            reason = error
            group.rmdir()
    print(f"skipped: no control group can be made here: {reason}")
    sys.exit(SKIPPED)


def main():
    build = pathlib.Path(sys.argv[1])
    group = make_group()
    command = [build / "bin/ds-launch", "--num_procs", "3", build / "tests/launcher_rank_program",
               "not-on", "1", "pause", "print", "I take a lot", "allocate", str(2 * LIMIT_MIB), "print", "I have it"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=60,
                              preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    finally:
        for _ in range(50):  # until the kernel has taken the last process out
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    print(done.stdout + done.stderr)
    assert done.returncode == 128 + 9, done.returncode
    for text in ("ds-launch: rank 1 (pid ", "killed by SIGKILL", "by the kernel's out-of-memory killer, because the control group "
                 f"reached its memory limit of {LIMIT_MIB} MiB; peak memory 2", "  | I take a lot"):
        assert text in done.stderr, text
    assert "I have it" not in done.stdout
    print("passed")


if __name__ == "__main__":
    main()

"""Commands with time limits, their output in one log, and what became of them."""

import os
import signal
import subprocess
import sys
import time

SHOWN_LINES, SHOWN_COLUMNS = 25, 200  # of a failed command's output


class RunLog:
    """Each command has a limit of its own, and none runs beyond `seconds` in all."""

    def __init__(self, path, seconds):
        self.file = open(path, "wb")
        self.begin = time.monotonic()
        self.seconds = seconds
        self.steps = []

    def left(self):
        return self.seconds - (time.monotonic() - self.begin)

    def run(self, kind, name, command, limit, environment=None):
        """Returns (ended with 0, stdout). What had no time left counts as failed, too."""
        limit = min(limit, self.left())
        step = {"kind": kind, "name": name, "status": "no time left", "seconds": 0.0}
        self.steps.append(step)
        if limit < 5:
            print(f"{name}: no time left", flush=True)
            return False, ""
        print(f"{name} ...", end=" ", flush=True)
        self.file.write(f"\n===== {name}: {' '.join(command)}\n".encode())
        self.file.flush()
        begin = time.monotonic()
        output, status = self.wait_for(command, limit, environment)
        step["seconds"] = round(time.monotonic() - begin, 1)
        step["status"] = status
        print(f"{status}, {step['seconds']:.0f} s", flush=True)
        if status != "passed":
            print("".join(f"  {line[:SHOWN_COLUMNS]}\n" for line in output.splitlines()[-SHOWN_LINES:]), end="", flush=True)
        return status == "passed", output

    def wait_for(self, command, limit, environment):
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, **(environment or {})})
        except OSError as error:
            return f"{command[0]}: {error}", "failed: cannot be started"
        try:
            output, _ = process.communicate(timeout=limit)
            code = process.returncode
            status = "passed" if code == 0 else f"failed: exit code {code}" if code > 0 else f"failed: signal {-code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own, with all that it started
            output, _ = process.communicate()
            status = f"failed: longer than {limit:.0f} s"
        self.file.write(output)
        self.file.flush()
        return output.decode(errors="replace"), status


def stop(message, code):
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)

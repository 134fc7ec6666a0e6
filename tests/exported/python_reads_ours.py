#!/usr/bin/env python3
"""Lets Python read what train_exported has written: the same program, trained weights, equal losses.

  tests/exported/python_reads_ours.py BUILD-FOLDER

Exports the models of examples/exported/export.py that draw no random numbers in forward, trains each for 40 steps on two
ranks, and starts from the written file again: the first loss in C++ has to be Python's of the same file and samples.
Needs an interpreter as scripts/install_peers prints it.
"""
import os
import re
import subprocess
import sys
import tempfile

import torch
import transformers.modeling_outputs  # noqa: F401  the classes that Llama returns, which torch.export.load needs

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLE = os.path.join(SOURCE, "examples", "exported")
FIRST = slice(16, 32)  # the samples of step 1 on one rank


def train(build, folder, name, ranks, steps):
    """The loss of each step that was printed."""
    command = [f"{build}/bin/ds-launch", "--num_procs", str(ranks), f"{build}/bin/train_exported", f"{folder}/{name}.pt2",
               f"{folder}/{name.split('.')[0]}.data.pt", "--steps", str(steps), "--deepspeed_config", f"{EXAMPLE}/ds_config.json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if done.returncode:
        sys.exit(done.stdout)
    return [float(loss) for loss in re.findall(r"step \d+  loss ([-+.\de]+)", done.stdout)]


def main():
    build = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        names = ["llama", "resnet", "graph"]
        subprocess.run([sys.executable, f"{EXAMPLE}/export.py", *names], cwd=folder, check=True)
        for name in names:
            train(build, folder, name, ranks=2, steps=40)
            before = torch.export.load(f"{folder}/{name}.pt2")
            after = torch.export.load(f"{folder}/{name}.trained.pt2")
            samples = torch.load(f"{folder}/{name}.data.pt")
            batch = {key: value[FIRST] for key, value in samples.items()}
            expected = after.module()(**batch)["loss"].item()
            untrained = before.module()(**batch)["loss"].item()
            before.module().load_state_dict(after.state_dict, strict=True)
            found, = train(build, folder, f"{name}.trained", ranks=1, steps=1)
            print(f"{name}: untrained {untrained:.6f}, trained: Python {expected:.6f}, C++ {found:.6f}")
            if abs(found - expected) > 1e-5 * (1 + expected) or expected > 0.9 * untrained:
                sys.exit(f"{name}: expected equal losses, well below that of the untrained model")


if __name__ == "__main__":
    main()

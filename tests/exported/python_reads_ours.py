#!/usr/bin/env python3
"""Lets Python read what train_exported has written: the same program, trained weights, equal losses.

  tests/exported/python_reads_ours.py BUILD-FOLDER [--inductor] [NAME...]

Exports each model of models.py with its loss inside, and those of examples/exported/export.py; trains each for 40 steps on
two ranks; and starts from the written file again on one rank. Then Python's program of the written file, and the eager model
after load_state_dict(strict=True), have to compute the loss that C++ prints first, on the same samples and random numbers.
--inductor: AOTInductor compiles the written file, too, and computes the same; for models without dropout, needs g++.
Needs an interpreter as scripts/install_peers prints it.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers.modeling_outputs  # noqa: F401  the classes that Llama returns, which torch.export.load needs

from models import MODELS, SHARED, dimensions_of, first_of, make, numbers

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLE = os.path.join(SOURCE, "examples", "exported")
EXAMPLES = ["example_llama", "example_resnet", "example_graph"]  # of export.py, those that draw no random numbers
SAMPLES, SEED = 64, 7
FIRST = slice(0, 16)  # the samples of step 1 on one rank


class WithLoss(torch.nn.Module):
    """A model of models.py that returns its loss. Inputs without a batch dimension are constants of it."""

    def __init__(self, name):
        super().__init__()
        self.model, self.kind, self.shared = make(name), MODELS[name][2], []
        for which, (key, (sizes, below)) in enumerate(MODELS[name][1].items()):
            if key in SHARED:
                self.register_buffer(f"shared_{key}", numbers(sizes, 0, which, below), persistent=False)
                self.shared.append(key)

    def forward(self, inputs, target=None):
        output = self.model(**inputs, **{key: getattr(self, f"shared_{key}") for key in self.shared})
        if self.kind == "output":
            return {"loss": output["loss"]}
        output = first_of(output)
        if self.kind == "next_token":
            loss = F.cross_entropy(output.reshape(-1, output.shape[-1]), inputs["tokens"].roll(-1, 1).reshape(-1))
        elif self.kind == "cross_entropy":
            loss = F.cross_entropy(output, target)
        else:  # the derivatives of the "heat" loss are no part of an export
            loss = output.square().mean() if target is None else F.mse_loss(output, target)
        return {"loss": loss}


def samples_of(name):
    """The samples of a model by the arguments of WithLoss.forward."""
    _, inputs, kind, wanted, _, _ = MODELS[name]
    given = {}
    for which, (key, (sizes, below)) in enumerate(inputs.items()):
        if key not in SHARED:
            given[key] = numbers([SAMPLES, *sizes], 0, 0 if key == "labels" else which, below)
    if kind == "cross_entropy":
        return given, numbers([SAMPLES], 0, 5, wanted)
    return given, numbers([SAMPLES, *wanted], 0, 5, 0) if kind == "mse" else None


def part_of(samples, which):
    inputs, target = samples
    return {key: value[which].clone() for key, value in inputs.items()}, None if target is None else target[which].clone()


def export(folder, name):
    """Writes NAME.pt2 and NAME.data.pt as train_exported takes them."""
    samples = samples_of(name)
    dimensions = {key: size for key, size in dimensions_of(name).items() if key not in SHARED}
    batch = next(iter(dimensions.values()))[0]
    shapes = {"inputs": dimensions, "target": None if samples[1] is None else {0: batch}}
    program = torch.export.export(WithLoss(name), part_of(samples, slice(0, 4)), dynamic_shapes=shapes, strict=False)
    torch.export.save(program, f"{folder}/{name}.pt2")
    data = {f"inputs.{key}": value for key, value in samples[0].items()}
    torch.save(data if samples[1] is None else {**data, "target": samples[1]}, f"{folder}/{name}.data.pt")


def train(build, folder, name, ranks, steps):
    """The loss of each step that was printed."""
    command = [f"{build}/bin/ds-launch", "--num_procs", str(ranks), f"{build}/bin/train_exported", f"{folder}/{name}.pt2",
               f"{folder}/{name.split('.')[0]}.data.pt", "--steps", str(steps), "--deepspeed_config", f"{folder}/ds_config.json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if done.returncode:
        sys.exit(done.stdout)
    return [float(loss) for loss in re.findall(r"step \d+  loss ([-+.\de]+)", done.stdout)]


def loss_of(call):
    torch.manual_seed(SEED)
    return call()["loss"].item()


def require_near(name, what, found, expected):
    if abs(found - expected) > 1e-5 * (1 + abs(expected)):
        sys.exit(f"{name}: {what} computes {found}, expected {expected} as C++ does")


def check(build, folder, name, inductor):
    is_example = name in EXAMPLES
    if is_example:
        written = name.removeprefix("example_")
        subprocess.run([sys.executable, f"{EXAMPLE}/export.py", written], cwd=folder, check=True)
        for ending in (".pt2", ".data.pt"):
            os.rename(f"{folder}/{written}{ending}", f"{folder}/{name}{ending}")
    else:
        export(folder, name)
    before = torch.export.load(f"{folder}/{name}.pt2")
    if is_example:
        keywords = {key: value[FIRST] for key, value in torch.load(f"{folder}/{name}.data.pt").items()}
        arguments = ()
    else:
        arguments, keywords = part_of(samples_of(name), FIRST), {}
    untrained = loss_of(lambda: before.module()(*arguments, **keywords))
    train(build, folder, name, ranks=2, steps=40)
    after = torch.export.load(f"{folder}/{name}.trained.pt2")
    cpp, = train(build, folder, f"{name}.trained", ranks=1, steps=1)
    require_near(name, "torch.export.load of the written file", loss_of(lambda: after.module()(*arguments, **keywords)), cpp)
    eager = before.module() if is_example else WithLoss(name)
    eager.load_state_dict(after.state_dict, strict=True)
    require_near(name, "the eager model", loss_of(lambda: eager(*arguments, **keywords)), cpp)
    if not cpp < untrained:
        sys.exit(f"{name}: expected a loss below {untrained}, that of the untrained model, found {cpp}")
    words = ""
    draws = [node for node in after.graph.nodes if "dropout" in str(node.target) and 0 not in node.args[1:2]]
    if inductor and draws:
        words = ", not compiled by AOTInductor, which draws other masks of dropout"
    elif inductor:
        package = torch._inductor.aoti_compile_and_package(after, package_path=f"{folder}/{name}.aoti.pt2")
        compiled = torch._inductor.aoti_load_package(package)
        require_near(name, "AOTInductor", loss_of(lambda: compiled(*arguments, **keywords)), cpp)
        words = ", AOTInductor computes the same"
    print(f"{name}: untrained {untrained:.6f}, trained {cpp:.6f} in C++ and Python{words}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("names", nargs="*", default=[*EXAMPLES, *MODELS])
    parser.add_argument("--inductor", action="store_true")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{EXAMPLE}/ds_config.json") as config, open(f"{folder}/ds_config.json", "w") as out:
            json.dump({**json.load(config), "seed": SEED}, out)
        for name in arguments.names:
            check(os.path.abspath(arguments.build), folder, name, arguments.inductor)


if __name__ == "__main__":
    main()

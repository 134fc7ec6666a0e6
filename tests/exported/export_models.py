#!/usr/bin/env python3
"""Writes tests/exported/data: each model of models.py as NAME.pt2, and NAME.json with what eager Python computes with it.

  tests/exported/export_models.py [NAME...]
  tests/exported/export_models.py --this_torch NAME...

Needs torch 2.11 and, for the hf_ ones, transformers 5.17: scripts/install_peers prints an interpreter that has both.
The second form writes data/torch2.9/NAME.pt2, or what else the version of torch is, and no golden values: initialised
alike, the models of all versions train to those of torch 2.11. It needs torch and numpy alone.

NAME.json: `inputs` and `target` as in models.py; `eval`, the first values of the output in eval() on the batch of step 0,
before training; `losses` of 20 steps; `first_gradients`, norms of the gradients of step 0; then, after the last step,
`norms` of all tensors of the state dict and `eval_after`. Dropout draws after torch.manual_seed(7).
"""
import json
import os
import sys

import torch

from models import BATCH, MODELS, SHARED, dimensions_of, first_of, inputs_of, loss_of, make

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
STEPS, SEED, SHOWN = 20, 7, 24


def export(name, folder=OUT):
    program = torch.export.export(make(name), (), inputs_of(name, 0, BATCH // 2), dynamic_shapes=dimensions_of(name),
                                  strict=False)
    shorten_traces(program.graph_module)
    torch.export.save(program, os.path.join(folder, f"{name}.pt2"))


def shorten_traces(module):
    """Keeps the innermost call of each node, without the folder of its file: files are small and name no machine."""
    for node in module.graph.nodes:
        trace = node.meta.get("stack_trace")
        if trace and 'File "' in trace:
            folder, _, rest = trace.rpartition('File "')[2].partition('", line')
            node.meta["stack_trace"] = f'File "{os.path.basename(folder)}", line{rest}'
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            shorten_traces(child)


def evaluated(name, model):
    with torch.no_grad():
        values = first_of(model.eval()(**inputs_of(name, 0))).flatten()[:SHOWN].tolist()
    model.train()
    return values


def norms(tensors):
    return {key: torch.linalg.vector_norm(value.double()).item() for key, value in tensors}


def train(name):
    _, inputs, kind, target, optimizer, rate = MODELS[name]
    model = make(name)
    golden = {
        "inputs": [{"name": key, "sizes": sizes, "below": below, "shared": key in SHARED} for key, (sizes, below) in inputs.items()],
        "loss": kind,
        "target": target,
        "optimizer": optimizer,
        "rate": rate,
        "eval": evaluated(name, model),
        "losses": []
    }
    if optimizer == "AdamW":
        steps = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    else:
        steps = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(SEED)
    for step in range(STEPS):
        loss = loss_of(name, model, step)
        steps.zero_grad()
        loss.backward()
        if step == 0:
            golden["first_gradients"] = norms((key, p.grad) for key, p in model.named_parameters())
        steps.step()
        golden["losses"].append(loss.item())
    golden["norms"] = norms(model.state_dict().items())
    golden["eval_after"] = evaluated(name, model)
    with open(os.path.join(OUT, f"{name}.json"), "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    if sys.argv[1:2] == ["--this_torch"]:
        folder = os.path.join(OUT, "torch" + ".".join(torch.__version__.split(".")[:2]))
        os.makedirs(folder, exist_ok=True)
        for name in sys.argv[2:]:
            export(name, folder)
        return
    for name in sys.argv[1:] or MODELS:
        export(name)
        train(name)
        print(name, os.path.getsize(os.path.join(OUT, f"{name}.pt2")), "bytes")


if __name__ == "__main__":
    main()

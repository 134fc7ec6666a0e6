"""Writes tests/porting/torch_saved with Python's torch (2.11, on the CPU):  python tests/porting/torch_saved.py

state_dict.pt: a net with the names and shapes of SmallNet (tests/model/small_run.h); element i of parameter n is
float(0.4 sin(0.7 i + n)), counted in the order of the names below. The others are what people save beside it, and what
must not be run.
"""
import os
import torch

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_saved")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 11)
        self.norm = torch.nn.LayerNorm([11])
        self.last = torch.nn.Linear(11, 3)
        with torch.no_grad():
            for n, parameter in enumerate(self.parameters()):
                steps = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + n
                parameter.copy_((torch.sin(steps) * 0.4).view(parameter.shape))


class Calls:
    """Unpickling it would run a program."""

    def __reduce__(self):
        return os.system, ("echo dsengine-ran-this >&2",)


def save(value, name):
    torch.save(value, os.path.join(FOLDER, name))


if __name__ == "__main__":
    os.makedirs(FOLDER, exist_ok=True)
    net = Net()
    save(net.state_dict(), "state_dict.pt")
    save({"epoch": 3, "model": net.state_dict()}, "training_state.pt")
    save(torch.nn.Linear(2, 2), "whole_module.pt")
    save({**net.state_dict(), "last.bias": Calls()}, "calls.pt")

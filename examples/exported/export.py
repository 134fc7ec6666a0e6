#!/usr/bin/env python3
"""Exports models for train_exported.cc: NAME.pt2, and NAME.data.pt with samples to train on.

  examples/exported/export.py [gpt2|llama|resnet|graph ...]

Needs torch 2.9 or newer; gpt2 and llama need Hugging Face's transformers. Models are small and drawn at random.

What each needs is the same: train() before the export, a forward whose result has an output named "loss", example tensors
that are different objects, and a name for each dimension that may differ later.
"""
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BATCH = Dim("batch", min=2, max=4096)


def save(name, model, data):
    """data: input of forward -> all samples, along dimension 0. The first four are the example of the export."""
    example = {key: samples[:4].clone() for key, samples in data.items()}
    program = torch.export.export(model.train(), (), example, dynamic_shapes={key: {0: BATCH} for key in data}, strict=False)
    torch.export.save(program, f"{name}.pt2")
    torch.save(data, f"{name}.data.pt")


def tokens():
    """Sequences that count up by a step of their own, modulo 64."""
    return (torch.randint(64, (256, 1)) + torch.randint(1, 5, (256, 1)) * torch.arange(16)) % 64


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                                       eos_token_id=0, use_cache=False))
    ids = tokens()
    save("gpt2", model, {"input_ids": ids, "labels": ids.clone()})


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                                         use_cache=False))
    ids = tokens()
    save("llama", model, {"input_ids": ids, "labels": ids.clone()})


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Residual(16), nn.MaxPool2d(2), Residual(16))
        self.fc = nn.Linear(16, 2)

    def forward(self, image, label):
        scores = self.fc(self.blocks(self.stem(image)).mean((2, 3)))
        return {"loss": F.cross_entropy(scores, label), "scores": scores}


def resnet():
    """Stripes across, or along."""
    label = torch.randint(2, (256,))
    across = torch.sin(torch.arange(8.0)).expand(256, 1, 8, 8)
    image = torch.where(label.view(-1, 1, 1, 1) == 0, across, across.mT) + 0.5 * torch.randn(256, 1, 8, 8)
    save("resnet", ResNet(), {"image": image, "label": label})


class MeshSurrogate(nn.Module):
    """What a solver computes on a mesh: messages along its edges are added up at the nodes."""

    def __init__(self, edges):
        super().__init__()
        self.register_buffer("edges", edges)
        self.encode, self.message, self.decode = nn.Linear(1, 16), nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, load, displacement):
        nodes, (source, target) = F.silu(self.encode(load)), self.edges
        for _ in range(3):
            messages = F.silu(self.message(torch.cat([nodes[:, source], nodes[:, target]], -1)))
            nodes = nodes + torch.zeros_like(nodes).index_add(1, target, messages)
        return {"loss": F.mse_loss(self.decode(nodes), displacement)}


def graph():
    """A ring of 12 nodes, whose displacement is the load smoothed along the ring."""
    ring = torch.arange(12)
    edges = torch.stack([torch.cat([ring, ring]), torch.cat([ring.roll(1), ring.roll(-1)])])
    load = torch.randn(256, 12, 1)
    save("graph", MeshSurrogate(edges), {"load": load, "displacement": (load + load.roll(1, 1) + load.roll(-1, 1)) / 3})


if __name__ == "__main__":
    torch.manual_seed(0)
    for which in sys.argv[1:] or ["gpt2", "llama", "resnet", "graph"]:
        {"gpt2": gpt2, "llama": llama, "resnet": resnet, "graph": graph}[which]()

"""Writes tests/core/safetensors_python.safetensors with the Python package (safetensors 0.8.0, torch 2.11)."""
import os

import torch
from safetensors.torch import save_file

save_file(
    {
        "bool": torch.tensor([True, False, True]),
        "u8": torch.tensor([0, 255, 7], dtype=torch.uint8),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
        "i16": torch.tensor([-5], dtype=torch.int16),
        "f16": torch.tensor([0.5, -1.0], dtype=torch.float16),
        "bf16": torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16),
        "i32": torch.tensor([-1, 1 << 30], dtype=torch.int32),
        "f32": torch.tensor([[1.0, -2.5], [3.0, 4.0]]),
        "f64": torch.tensor([1e300], dtype=torch.float64),
        "i64": torch.tensor([-1, 1 << 40]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    },
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "safetensors_python.safetensors"),
    metadata={"format": "pt"},
)

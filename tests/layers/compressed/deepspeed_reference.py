#!/usr/bin/env python3
"""Records what DeepSpeed 0.19.6's own functions of compression make of some numbers, for quantizers_test.cc.

  deepspeed_reference.py DEEPSPEED/deepspeed/compression/utils.py > deepspeed_reference.txt

Later versions have no such file. A line: what, bits, groups, ratio, then the values of a [6, 8] tensor in float64.
"""

import importlib.util
import sys

import torch


def main():
    spec = importlib.util.spec_from_file_location("deepspeed_compression_utils", sys.argv[1])
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    steps = torch.arange(48, dtype=torch.float64)
    x = (torch.sin(steps * 0.73) * (steps + 1) * 0.1).view(6, 8)

    def put(what, bits, groups, ratio, values):
        print(what, bits, groups, ratio, *(repr(v) for v in values.flatten().tolist()))

    for groups in (1, 2, 6):
        for bits in (3, 4, 8):
            put("symmetric", bits, groups, 1, utils.SymQuantizer.apply(x, bits, None, None, groups))
            put("asymmetric", bits, groups, 1, utils.AsymQuantizer.apply(x, bits, None, None, groups))
        put("symmetric", 2, groups, 1, utils.TernaryQuantizer.apply(x, 2, None, None, groups))
        put("symmetric", 1, groups, 1, utils.BinaryQuantizer.apply(x, 1, None, None, groups))
    for ratio in (0.1, 0.5, 0.77):
        put("mask", 0, 1, ratio, utils.TopKBinarizer.apply(x, ratio, False))


if __name__ == "__main__":
    main()

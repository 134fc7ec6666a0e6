#!/usr/bin/env python3
"""usage: elastic_reference.py DEEPSPEED > elastic_reference.json

What DeepSpeed's elasticity makes of random configs. DEEPSPEED is the unpacked source of a version that still has it
(0.18.3: pip download --no-deps --no-binary :all: deepspeed==0.18.3); nothing of it but elasticity/ is imported.

0.19.6 leaves out candidates above the maximum, which the common multiple of the micro-batches may be; so does this.

Each case is the section, the data-parallel size, and either "refused" or batch, micro-batch and valid sizes. Two things
are not as DeepSpeed has them: a batch of 0 counts as refused, and with model_parallel_size above 1 the number of GPUs
that goes in is that of all ranks (DeepSpeed's own call gives the data-parallel size where it then expects GPUs).
"""
import importlib
import json
import logging
import random
import sys
import types


def load(folder):
    package = types.ModuleType("deepspeed")
    package.__path__ = [f"{folder}/deepspeed"]
    version = types.ModuleType("deepspeed.git_version_info")
    version.version = "0.18.3"
    utils = types.ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")
    elasticity = types.ModuleType("deepspeed.elasticity")  # its __init__ would import torch's agent
    elasticity.__path__ = [f"{folder}/deepspeed/elasticity"]
    sys.modules.update({"deepspeed": package, "deepspeed.git_version_info": version, "deepspeed.utils": utils,
                        "deepspeed.elasticity": elasticity})
    module = importlib.import_module("deepspeed.elasticity.elasticity")
    candidates = module.get_candidate_batch_sizes
    module.get_candidate_batch_sizes = lambda bases, limit: candidates([base for base in bases if base <= limit], limit)
    return module


def random_section(dice):
    section = {
        "enabled": True,
        "max_train_batch_size": dice.choice([dice.randint(1, 64), dice.randint(64, 4096), dice.randint(4096, 10**7)]),
        "micro_batch_sizes": [dice.choice([1, 2, 3, 4, 6, 8, 12, 16, 17, 32]) for _ in range(dice.randint(1, 4))],
        "version": dice.choice([0.1, 0.2]),
    }
    if dice.random() < 0.4:
        section["prefer_larger_batch"] = False
    if dice.random() < 0.4:
        section["min_gpus"] = dice.randint(1, 20)
    if dice.random() < 0.4:
        section["max_gpus"] = section.get("min_gpus", 1) + dice.randint(0, 200)
    if section["version"] == 0.2 and dice.random() < 0.6:
        section["model_parallel_size"] = dice.choice([1, 1, 2, 3, 4])
        section["num_gpus_per_node"] = section["model_parallel_size"] * dice.choice([1, 2, 4])
        if dice.random() < 0.1:
            section["num_gpus_per_node"] += 1
    elif dice.random() < 0.05:
        section["model_parallel_size"] = 2
    return section


def answer(elasticity, section, size):
    parallel = section.get("model_parallel_size", 1)
    try:
        if parallel > 1 and section["version"] == 0.2:
            batch, valid, _ = elasticity._get_compatible_gpus_v02(
                section["micro_batch_sizes"], section["max_train_batch_size"], size * parallel,
                section.get("min_gpus", 1), section.get("max_gpus", 10000), section.get("prefer_larger_batch", True),
                section.get("num_gpus_per_node", 1), parallel)
            batch = int(batch)
            micro = max(micro for micro in section["micro_batch_sizes"] if batch // size % micro == 0)
        else:
            batch, valid, micro = elasticity.compute_elastic_config({"elasticity": section}, "0.18.3", world_size=size)
    except (elasticity.ElasticityError, ValueError, TypeError) as error:
        return {"refused": type(error).__name__}
    if batch == 0:
        return {"refused": "batch of 0"}
    return {"batch": int(batch), "micro": int(micro), "valid": [int(size) for size in valid]}


def main():
    elasticity = load(sys.argv[1])
    dice = random.Random(20)
    print("[")
    separator = ""
    for _ in range(300):
        section = random_section(dice)
        size = dice.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 60])
        found = answer(elasticity, section, size)
        if len(found.get("valid", [])) > 20:  # to keep the file small
            found["count"] = len(found["valid"])
            found["valid"] = found["valid"][:10] + found["valid"][-10:]
        print(separator + json.dumps({"elasticity": section, "size": size, **found}, separators=(",", ":")), end="")
        separator = ",\n"
    print("\n]")


if __name__ == "__main__":
    main()

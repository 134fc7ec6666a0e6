#!/usr/bin/env python3
"""Whether transformers and PEFT load what `llama` writes, and compute the same with it.

  llama_reads_our_export.py BUILD_FOLDER      (of this project: BUILD_FOLDER/bin/llama)

For each family of tests/examples/llama: a model trained for some steps at stage 3 on two ranks, exported and loaded by
transformers, has the loss that the program reports for the next step; adapters trained so are loaded by PEFT over the
base, and have the loss too, as has the merged folder. Needs torch, transformers 5.17 and safetensors
(scripts/install_peers). Without a PEFT that works with this transformers the names of the adapters are compared with
those of the fixtures, which PEFT wrote, and that is said. Exit code 0: all agree.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

try:
    from peft import PeftModel
except ImportError as error:
    PeftModel = None
    print(f"no PEFT ({error}): adapters are compared by name and shape")

HERE = os.path.dirname(os.path.abspath(__file__))
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB, TIME, BATCH, STEPS = 48, 12, 4, 5


def run(build, *arguments, ranks=1):
    command = [f"{build}/bin/ds-launch", "--num_procs", str(ranks), f"{build}/bin/llama", *arguments]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def first_loss(text):
    return float(re.search(r"step 1  loss (\S+)", text).group(1))


def loss_of(model, tokens):
    with torch.no_grad():
        logits = model.eval()(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def load(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind, names in report.items():
        assert not names, f"{folder}: {kind}: {names}"
    return model


def adapted(base, folder, fixture):
    if PeftModel is not None:
        return PeftModel.from_pretrained(load(base), folder)
    ours = load_file(os.path.join(folder, "adapter_model.safetensors"))
    theirs = load_file(os.path.join(fixture, "adapter", "adapter_model.safetensors"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}, "names or shapes differ"
    return None


def check(build, work, family):
    fixture = os.path.join(HERE, "llama", family)
    # All sequences of the file are one batch, so that its loss does not depend on their order.
    text = torch.randint(0, VOCAB, (BATCH * TIME + 1,), generator=torch.Generator().manual_seed(3))
    data = os.path.join(work, "tokens.bin")
    text.to(torch.int16).numpy().tofile(data)
    tokens = torch.stack([text[n * TIME:n * TIME + TIME + 1] for n in range(BATCH)])
    config = os.path.join(work, "config.json")
    with open(config, "w") as out:
        json.dump({"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                   "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}, out)
    train = ["train", "--deepspeed_config", config, "--data", data, "--seq_len", str(TIME)]
    whole, adapter, merged = (os.path.join(work, family + kind) for kind in ("_whole", "_adapter", "_merged"))
    run(build, *train, "--model", fixture, "--steps", str(STEPS), "--export", whole, ranks=2)
    run(build, *train, "--model", fixture, "--steps", str(STEPS), "--export", adapter, "--lora_rank", "2", ranks=2)
    run(build, "merge", "--model", fixture, "--adapter", adapter, "--out", merged)
    cases = {
        "trained whole": (load(whole), ["--model", whole]),
        "adapters": (adapted(fixture, adapter, fixture), ["--model", fixture, "--adapter", adapter]),
        "merged": (load(merged), ["--model", merged]),
    }
    fine = True
    for what, (model, flags) in cases.items():
        ours = first_loss(run(build, *train, *flags, "--steps", "1", ranks=2))
        if model is None:
            print(f"{family}, {what}: loss {ours:.6f}; names and shapes are PEFT's")
            continue
        theirs = loss_of(model, tokens)
        print(f"{family}, {what}: loss {ours:.6f}, Python {theirs:.6f}")
        fine = fine and abs(ours - theirs) < 1e-5
    return fine


def main():
    with tempfile.TemporaryDirectory() as work:
        fine = [check(os.path.abspath(sys.argv[1]), work, family) for family in FAMILIES]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()

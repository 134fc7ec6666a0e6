"""What scripts/gpu_check measures: copies between host and device, steps with and without offload and with FP8, steps beside
torch's from Python, the largest model.

Everything is a ratio or a number of this one run; what each number is made of is kept beside it. A measurement that does
not end well is left out, and its log says why; nothing here decides a test.
"""

import importlib.util
import json
import os
import sys

HOST_BYTES = 14    # an element in bf16 with optimizer offload: gradient 2, master 4, AdamW's states 8 (docs/offload.md)
DEVICE_BYTES = 2   # its parameter
# Of memory that is free; the rest is for activations, gathers and the system.
HOST_SHARE, DEVICE_SHARE = 0.88, 0.75
BILLION = ["--layers", "20", "--hidden", "2048", "--heads", "16", "--seq_len", "1024"]
LARGE_HIDDEN = 4096
EIGHT_BILLION_LAYERS = 40
PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer.py")
PEERS = ("fsdp2", "compiled", "autocast")
# name: (layers, hidden, heads, tokens of a sequence, vocabulary, batch)
MODELS = {"1B": (20, 2048, 16, 1024, 256, 8),
          "1B of 50304 tokens": (20, 2048, 16, 2048, 50304, 8),
          "7B": (32, 4096, 32, 2048, 32000, 2)}
BYTES_OF_STATES = 16   # an element that trains in bf16 with AdamW: 2 + 2, master 4, moments 8
PEAK_BF16 = {"H100": 989e12, "H200": 989e12}   # dense, of the SXM boards, by NVIDIA's data sheets
SECTIONS = ("copies", "kernels", "steps", "peers", "profile", "large_steps", "largest")


def matmul_parameters(layers, hidden, vocab):
    """Elements that multiply each token: blocks and head, without the tables that are only looked up."""
    return layers * 12 * hidden ** 2 + vocab * hidden


def model_flops(layers, hidden, seq_len, vocab, tokens):
    """Of a step, forward and backward, without what is computed again: PaLM's 6 N + 12 L H Q T (arXiv:2204.02311)."""
    return (6 * matmul_parameters(layers, hidden, vocab) + 12 * layers * hidden * seq_len) * tokens


def ds_config(offload=None, batch=8, more=None, stage=2):
    zero = {"stage": stage}
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", **offload}
    return {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
            "steps_per_print": None, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, **(more or {})}


class Measurements:
    def __init__(self, log, build, scratch, gpu, host_bytes, models=tuple(MODELS), kinds=PEERS):
        """`models`, `kinds`: of peers(), and what that runs of torch."""
        self.log, self.build, self.scratch = log, build, scratch
        self.gpu_bytes, self.host_bytes = gpu["bytes"], host_bytes
        self.peak = next((peak for name, peak in PEAK_BF16.items() if name in gpu["name"]), None)
        self.models, self.kinds = models, kinds
        self.result = {}
        os.makedirs(scratch, exist_ok=True)

    def json_of(self, name, arguments, limit):
        """The JSON object that a program prints last, or None."""
        return self.json_of_command(name, [os.path.join(self.build, "bin", arguments[0]), *arguments[1:]], limit)

    def json_of_command(self, name, command, limit):
        done, output = self.log.run("benchmark", name, command, limit)
        for line in reversed(output.splitlines() if done else []):
            if line.startswith("{"):
                return json.loads(line)
        return None

    def train(self, name, config, arguments, limit):
        path = os.path.join(self.scratch, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        return self.json_of(name, ["gpu_bench", "train", "--config", path, *arguments], limit)

    def all(self, sections=SECTIONS):
        for section in sections:
            getattr(self, section)()
        return self.result

    def copies(self):
        found = self.json_of("copies", ["gpu_bench", "copies"], 60)
        if not found:
            return
        rows = self.result["copies"] = found["copies"]
        large = max(row["bytes"] for row in rows)
        speed = {(row["memory"], row["to"]): row["bytes_per_second"] for row in rows if row["bytes"] == large}
        for to in ("device", "host"):
            if ("pinned", to) in speed:
                self.result[f"pinned_over_pageable_to_{to}"] = speed["pinned", to] / speed["pageable", to]

    def kernels(self):
        """The codecs' kernels beside a copy, and the fused operators beside the chains that they replace."""
        found = self.json_of("kernels of codecs", ["gpu_bench", "kernels"], 40)
        if found:
            self.result["kernels"] = found["kernels"]
        done, output = self.log.run("benchmark", "fused operators", [
            os.path.join(self.build, "bin/fused_ops_bench"), "--device", "cuda", "--rows", "16384", "--size", "4096", "--heads",
            "32"], 60)
        if done:
            self.result["fused_operators"] = output.splitlines()

    def steps(self):
        """A model of 1B parameters, the same batch: on the device alone, and in the ways to offload the optimizer."""
        cases = {"plain": None, "offload": {}, "super_offload": {"super_offload": True},
                 "delayed_update": {"delayed_update": True, "delayed_update_start": 1}}
        self.steps_of("1B", cases, [*BILLION, "--batch", "8"], 75)

    def large_steps(self):
        """Likewise of 8B, where device and host hold all of it."""
        elements = EIGHT_BILLION_LAYERS * 12 * LARGE_HIDDEN ** 2
        if BYTES_OF_STATES * elements > 0.9 * self.gpu_bytes or HOST_BYTES * elements > 0.92 * self.host_bytes:
            return
        self.steps_of("8B", {"plain": None, "offload": {}},
                      ["--layers", str(EIGHT_BILLION_LAYERS), "--hidden", str(LARGE_HIDDEN), "--heads", "32", "--seq_len",
                       "1024", "--batch", "8", "--steps", "2", "--warmup", "1", "--bf16_start",
                       "--activation_checkpointing"], 120)

    def steps_of(self, model, cases, arguments, limit):
        runs = {name: self.train(f"{model} parameters, {name}", ds_config(offload), arguments, limit)
                for name, offload in cases.items()}
        runs = {name: run for name, run in runs.items() if run}
        result = self.result[f"steps_of_{model}"] = {"runs": runs}
        if "plain" not in runs:
            return
        for name in runs.keys() - {"plain"}:
            result[f"step_{name}_over_plain"] = runs[name]["step_seconds"] / runs["plain"]["step_seconds"]
        if "offload" in runs:
            result.update(self.hidden(runs["plain"], runs["offload"]))

    def hidden(self, plain, offload):
        """The share of the time that copies take which does not lengthen the step: 1 - (longer / copies alone)."""
        if "copies" not in self.result:
            self.copies()
        speed = {row["to"]: row["bytes_per_second"] for row in self.result.get("copies", ())
                 if row["memory"] == "pinned" and row["bytes"] >= 1 << 28}
        bytes_one_way = 2 * plain["parameters"]  # gradients leave and weights return in bf16
        shares = {}
        if "host" in speed:
            longer = offload["backward_seconds"] - plain["backward_seconds"]
            alone = bytes_one_way / speed["host"]
            shares["gradient_copies"] = {"seconds_alone": alone, "backward_longer_by": longer,
                                         "share_hidden": 1 - longer / alone}
        update = self.host_update_seconds(plain["parameters"])
        if "device" in speed and update:
            longer = offload["update_seconds"] - update
            alone = bytes_one_way / speed["device"]
            # The update alone is measured in another program and over fewer elements: an estimate.
            shares["weight_copies"] = {"seconds_alone": alone, "host_update_alone": update, "update_longer_by": longer,
                                       "share_hidden_estimate": 1 - longer / alone}
        return shares

    def host_update_seconds(self, parameters):
        found = self.result.get("host_update") or self.json_of("update on the host alone", ["cpu_adam_bench", "--only", "ours", "--rounds", "5", "--json",
                                                          "--parameters", "200000000", "--threads",
                                                          str(os.cpu_count())], 45)
        if not found:
            return None
        self.result["host_update"] = found
        return found["cases"]["ours step bf16"]["ns_per_parameter"] * 1e-9 * parameters

    def arguments_of(self, model):
        layers, hidden, heads, seq_len, vocab, batch = MODELS[model]
        return list(map(str, ["--layers", layers, "--hidden", hidden, "--heads", heads, "--seq_len", seq_len, "--vocab",
                              vocab, "--batch", batch]))

    def peers(self):
        """Steps of one model, here and in torch from Python, one after the other; and here with FP8."""
        rows = self.result["beside_torch"] = []
        with_torch = importlib.util.find_spec("torch") is not None
        for model in self.models:
            layers, hidden, _, seq_len, vocab, batch = MODELS[model]
            states = BYTES_OF_STATES * matmul_parameters(layers, hidden, vocab)
            if states > 0.75 * self.gpu_bytes:
                continue
            large = states > 64 << 30
            start = ["--bf16_start"] if large else []
            programs = [("dsengine", {}), ("dsengine, stage 3", {"stage": 3}),
                        ("dsengine, fp8", {"more": {"fp8": {"enabled": True}}})]
            runs = [(name, self.train(f"{model}, {name}", ds_config(batch=batch, **of_config),
                                      [*self.arguments_of(model), *start], 100)) for name, of_config in programs]
            if with_torch:
                kinds = [kind for kind in self.kinds if kind == "fsdp2" or not large]  # others keep more than it
                runs += [(f"torch, {kind}", self.json_of_command(
                    f"{model}, torch, {kind}", [sys.executable, PEER, kind, *self.arguments_of(model)], 120)) for kind in kinds]
            for name, run in runs:
                if not run:
                    continue
                row = {"model": model, "program": name, "tokens_per_second": run["tokens_a_step"] / run["step_seconds"], **run}
                if self.peak and "fp8" not in name:
                    flops = model_flops(layers, hidden, seq_len, vocab, run["tokens_a_step"])
                    row["model_flops_utilization"] = flops / run["step_seconds"] / self.peak
                rows.append(row)

    def profile(self):
        """Which kernels the time of a step goes to."""
        self.result["profiles"] = {
            model: self.train(f"{model}, profile", ds_config(batch=MODELS[model][5]),
                              [*self.arguments_of(model), "--steps", "2", "--profile"], 75)
            for model in list(MODELS)[:2]}

    def largest(self):
        """Models that memory should hold by the table of docs/offload.md: trained two steps, or why not."""
        device, host = DEVICE_SHARE * self.gpu_bytes, HOST_SHARE * self.host_bytes
        both = (device + host) / (HOST_BYTES + DEVICE_BYTES)
        cases = [("device alone", device / (HOST_BYTES + DEVICE_BYTES), None),
                 ("optimizer on the host", min(host / HOST_BYTES, device / DEVICE_BYTES), {}),
                 ("optimizer on both", both, {"ratio": round(min(1.0, host / (HOST_BYTES * both)), 3)})]
        found = self.result["largest"] = []
        for name, elements, offload in cases:
            layers = max(1, int(elements / (12 * LARGE_HIDDEN ** 2)))
            run = self.train(f"{layers * 12 * LARGE_HIDDEN ** 2 / 1e9:.1f}B parameters, {name}", ds_config(offload, batch=1),
                             ["--layers", str(layers), "--hidden", str(LARGE_HIDDEN), "--heads", "32", "--seq_len", "1024",
                              "--batch", "1", "--steps", "1", "--warmup", "1", "--bf16_start",
                              "--activation_checkpointing"], 200)
            found.append({"where": name, "layers": layers, "offload_optimizer": offload, "status": self.log.steps[-1]["status"], "run": run})

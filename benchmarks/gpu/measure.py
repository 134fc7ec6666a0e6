"""What scripts/gpu_check measures: copies between host and device, steps with and without offload, the largest model.

Everything is a ratio or a number of this one run; what each number is made of is kept beside it. A measurement that does
not end well is left out, and its log says why; nothing here decides a test.
"""

import json
import os

HOST_BYTES = 14    # an element in bf16 with optimizer offload: gradient 2, master 4, AdamW's states 8 (docs/offload.md)
DEVICE_BYTES = 2   # its parameter
# Of memory that is free; the rest is for activations, gathers and the system.
HOST_SHARE, DEVICE_SHARE = 0.88, 0.75
BILLION = ["--layers", "20", "--hidden", "2048", "--heads", "16", "--seq_len", "1024"]
LARGE_HIDDEN = 4096


def ds_config(offload=None, batch=8):
    zero = {"stage": 2}
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", **offload}
    return {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
            "steps_per_print": None, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


class Measurements:
    def __init__(self, log, build, scratch, gpu_bytes, host_bytes):
        self.log, self.build, self.scratch = log, build, scratch
        self.gpu_bytes, self.host_bytes = gpu_bytes, host_bytes
        self.result = {}
        os.makedirs(scratch, exist_ok=True)

    def json_of(self, name, arguments, limit):
        """The JSON object that a program prints last, or None."""
        done, output = self.log.run("benchmark", name, [os.path.join(self.build, "bin", arguments[0]), *arguments[1:]], limit)
        for line in reversed(output.splitlines() if done else []):
            if line.startswith("{"):
                return json.loads(line)
        return None

    def train(self, name, config, arguments, limit):
        path = os.path.join(self.scratch, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        return self.json_of(name, ["gpu_bench", "train", "--config", path, *arguments], limit)

    def all(self):
        self.copies()
        self.steps()
        self.largest()
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

    def steps(self):
        """A model of 1B parameters, the same batch: on the device alone, and in the ways to offload the optimizer."""
        cases = {"plain": None, "offload": {}, "super_offload": {"super_offload": True},
                 "delayed_update": {"delayed_update": True, "delayed_update_start": 1}}
        runs = {name: self.train(f"1B parameters, {name}", ds_config(offload), [*BILLION, "--batch", "8"], 75)
                for name, offload in cases.items()}
        runs = {name: run for name, run in runs.items() if run}
        self.result["steps_of_1B"] = runs
        if "plain" in runs:
            for name in runs.keys() - {"plain"}:
                self.result[f"step_{name}_over_plain"] = runs[name]["step_seconds"] / runs["plain"]["step_seconds"]
        if {"plain", "offload"} <= runs.keys():
            self.hidden(runs["plain"], runs["offload"])

    def hidden(self, plain, offload):
        """The share of the time that copies take which does not lengthen the step: 1 - (longer / copies alone)."""
        speed = {row["to"]: row["bytes_per_second"] for row in self.result.get("copies", ())
                 if row["memory"] == "pinned" and row["bytes"] >= 1 << 28}
        bytes_one_way = 2 * plain["parameters"]  # gradients leave and weights return in bf16
        if "host" in speed:
            longer = offload["backward_seconds"] - plain["backward_seconds"]
            alone = bytes_one_way / speed["host"]
            self.result["gradient_copies"] = {"seconds_alone": alone, "backward_longer_by": longer,
                                              "share_hidden": 1 - longer / alone}
        update = self.host_update_seconds(plain["parameters"])
        if "device" in speed and update:
            longer = offload["update_seconds"] - update
            alone = bytes_one_way / speed["device"]
            # The update alone is measured in another program and over fewer elements: an estimate.
            self.result["weight_copies"] = {"seconds_alone": alone, "host_update_alone": update,
                                            "update_longer_by": longer, "share_hidden_estimate": 1 - longer / alone}

    def host_update_seconds(self, parameters):
        found = self.json_of("update on the host alone", ["cpu_adam_bench", "--only", "ours", "--rounds", "5", "--json",
                                                          "--parameters", "200000000", "--threads",
                                                          str(os.cpu_count())], 45)
        if not found:
            return None
        self.result["host_update"] = found
        return found["cases"]["ours step bf16"]["ns_per_parameter"] * 1e-9 * parameters

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

#!/usr/bin/env python3
"""usage: locales.py BUILD SCRATCH SOURCE

Trains the GPT on two ranks in programs that take the locale of their user (program_locale.cc): a decimal comma, groups
of digits, Turkish letters, a decimal point of two bytes. Config, losses, csv, tags, names of files and of tensors, and
what ds-launch and ds-tool read and say are those of the C locale.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

BUILD, SCRATCH, SOURCE = (pathlib.Path(path).absolute() for path in sys.argv[1:4])
LOCALES = {"de_DE": "1.032,5", "tr_TR": "1.032,5; the small letter of I is no i", "en_US": "1,032.5", "ps_AF": "two bytes"}
FIRST_STEPS, STEPS = 1000, 1002  # so that the numbers of steps have groups of digits
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "LION", "params": {"lr": 0.0015, "betas": [0.9, 0.99], "weight_decay": 0.01}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "gpt"},
    "checkpoint": {"durable": False},
}


def check(holds, expected, found):
    if not holds:
        sys.exit(f"FAILED: expected {expected}, found:\n{found}")


def make_locale(name):
    """The letters and numbers of a locale; what else one has takes most of the time that localedef needs."""
    rest = ("COLLATE", "MONETARY", "TIME", "MESSAGES", "PAPER", "NAME", "ADDRESS", "TELEPHONE", "MEASUREMENT", "IDENTIFICATION")
    parts = [("CTYPE", name), ("NUMERIC", name), *((part, "POSIX") for part in rest)]
    source = SCRATCH / f"{name}.source"
    source.write_text("".join(f'LC_{part}\ncopy "{of}"\nEND LC_{part}\n' for part, of in parts))
    # It ends with 1 after warnings.
    made = subprocess.run(["localedef", "--quiet", "-i", source, "-f", "UTF-8", SCRATCH / "locales" / f"{name}.UTF-8"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check((SCRATCH / "locales" / f"{name}.UTF-8" / "LC_NUMERIC").exists(),
          "localedef and the sources of locales (`scripts/setup test` installs them)", made.stdout)


def environment_of(locale):
    return {**os.environ, "OMP_NUM_THREADS": "1", "LOCPATH": str(SCRATCH / "locales"), "LC_ALL": f"{locale}.UTF-8" if locale else "C"}


def run(command, folder, locale, codes=(0,)):
    done = subprocess.run([str(part) for part in command], cwd=folder, env=environment_of(locale), text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    check(done.returncode in codes, f"exit code {codes} of {command} under {locale or 'C'}", done.stdout[-6000:])
    return done.stdout


def train(folder, steps, locale, metrics):
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    (folder / "hosts").write_text("localhost slots=2\n")
    own = ["env", f"LD_PRELOAD={BUILD}/tests/libprogram_locale.so"] if locale else []
    return run([BUILD / "bin/ds-launch", "--hostfile", "hosts", "--num_procs", 2, "--", *own, BUILD / "bin/gpt",
                "--deepspeed_config", "ds_config.json", "--data", SOURCE / "tests/parity/data/kjv_1m.bin", "--layers", 1,
                "--hidden", 32, "--heads", 2, "--seq_len", 8, "--order", "sequential", "--generate", 0, "--steps", steps,
                "--metrics", metrics, "--save_checkpoint", "saves", "--load_checkpoint", "saves"], folder, locale)


def outcome(folder):
    """What the last steps left, without what says when."""
    with open(folder / "metrics") as lines:
        losses = [entry["loss"] for entry in map(json.loads, lines) if "step" in entry]
    saves = folder / "saves"
    return {
        "losses": losses,
        # The memory of a process is not the same in two runs.
        "csv": {path.name: path.read_text() for path in sorted((folder / "csv/gpt").iterdir()) if "resident" not in path.name},
        "latest": (saves / "latest").read_text(),
        "files": sorted(str(path.relative_to(saves)) for path in saves.rglob("*")),
        "tensors": {str(path.relative_to(saves)): path.read_bytes() for path in sorted(saves.rglob("*.safetensors"))},
    }


def tour(locale):
    """The last steps from the first ones' checkpoint, in a folder of their own."""
    folder = SCRATCH / (locale or "C")
    folder.mkdir()
    shutil.copytree(SCRATCH / "first/saves", folder / "saves")
    train(folder, STEPS, locale, "metrics")
    found = outcome(folder)
    tool = BUILD / "bin/ds-tool"
    found["check"] = run([tool, "check", "ds_config.json", "--world_size", 2, "--parameters", 1234567], folder, locale)
    found["refused"] = run([tool, "check", "ds_config.json", "--world_size", 2, "--auto", "lr=0.5"], folder, locale, codes=(1, 2))
    found["inspect"] = run([tool, "checkpoint", "inspect", "saves"], folder, locale)
    return found


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    (SCRATCH / "locales").mkdir(parents=True)
    for name in LOCALES:
        make_locale(name)
    (SCRATCH / "first").mkdir()
    train(SCRATCH / "first", FIRST_STEPS, None, "metrics")
    expected = tour(None)
    check(f"global_step{STEPS}" in expected["latest"] and len(expected["losses"]) == STEPS - FIRST_STEPS and expected["csv"],
          "the last steps in the C locale", expected["files"])
    for name, numbers in LOCALES.items():
        found = tour(name)
        for what, value in expected.items():
            check(found[what] == value, f"the same {what} under {name} ({numbers}) as in the C locale, {str(value)[:2000]}",
                  str(found[what])[:2000])
        print(f"{name}: as in the C locale")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""usage: describe_programs.py DS_LAUNCH DS_TOOL FOLDER

Writes the manual pages (NAME.1.gz) and the bash completion (NAME.bash) of ds-launch and ds-tool into FOLDER. All that
they say is what the programs print for --help, so that there is no second text to keep true.
"""
import dataclasses
import gzip
import os
import re
import subprocess
import sys

# A line of CLI11's help: flags or the name of a command, two spaces or a new line, and what it does.
ENTRY = re.compile(r"^  (?! )(?P<head>.*?)(?:  +(?P<text>\S.*))?$")
SECTION = re.compile(r"^(?P<name>[A-Z][A-Za-z ]*):$")


@dataclasses.dataclass
class Command:
    words: list[str]  # "ds-tool", "checkpoint", "diff"
    description: str
    usage: str
    sections: dict[str, list[tuple[str, str]]]  # "Options": [("-h,--help", "Print ..."), ...]
    commands: list["Command"]

    def flags(self) -> list[str]:
        """Every spelling: --num_procs and --nproc_per_node of "--num_procs,--nproc_per_node TEXT Excludes: ..."."""
        heads = [head.split(" ")[0] for entries in self.sections.values() for head, _ in entries]
        return [flag for head in heads if head.startswith("-") for flag in re.findall(r"(?:^|,)(-[-\w]+)", head)]


def help_of(program: str, words: list[str]) -> str:
    result = subprocess.run([program, *words, "--help"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"describe_programs.py: {program} {' '.join(words)} --help: expected exit code 0, found {result.returncode}: "
                 f"{result.stderr.strip()}")
    return result.stdout


def read_entries(lines: list[str]) -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    for line in lines:
        found = ENTRY.match(line)
        if found:
            entries.append((found["head"], found["text"] or ""))
        elif line.strip() and entries:  # the text of a long head stands in the next line
            head, text = entries[-1]
            entries[-1] = (head, f"{text} {line.strip()}".strip())
    return entries


def describe(program: str, words: list[str]) -> Command:
    lines = help_of(program, words[1:]).splitlines()
    usage = next(index for index, line in enumerate(lines) if line.startswith("Usage: "))
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines[usage + 1:]:
        found = SECTION.match(line)
        if found:
            current = sections.setdefault(found["name"], [])
        elif line.startswith(" "):
            current.append(line)
    entries = {name: read_entries(text) for name, text in sections.items()}
    commands = [describe(program, [*words, head]) for head, _ in entries.pop("Subcommands", [])]
    return Command(words, " ".join(lines[:usage]).strip(), lines[usage].removeprefix("Usage: "), entries, commands)


def roff(text: str) -> str:
    """As roff shows it literally: hyphens that can be copied, no requests."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text)


def roff_of(command: Command, level: str) -> list[str]:
    lines = [f".{level} {roff(' '.join(command.words[1:]).upper() if level == 'SH' else ' '.join(command.words))}",
             roff(command.description), ".PP", f".B {roff(command.usage)}"]
    for name, entries in command.sections.items():
        lines += [".PP", f"{roff(name)}:"]
        for head, text in entries:
            lines += [".TP", f".B {roff(head)}", roff(text)]
    for inner in command.commands:
        lines += roff_of(inner, "SS")
    return lines


def manual_page(command: Command, version: str) -> str:
    name = command.words[0]
    short = command.description.split(". ")[0].rstrip(".")
    lines = [f'.TH {name.upper()} 1 "" "dsengine {version}" "User Commands"', ".SH NAME", f"{roff(name)} \\- {roff(short)}",
             ".SH SYNOPSIS", f".B {roff(command.usage)}", ".SH DESCRIPTION", roff(command.description)]
    for section, entries in command.sections.items():
        lines.append(f".SH {section.upper()}")
        for head, text in entries:
            lines += [".TP", f".B {roff(head)}", roff(text)]
    for inner in command.commands:
        lines += roff_of(inner, "SH")
    return "\n".join(lines) + "\n"


def completion(command: Command) -> str:
    """Flags of the command that the line has, its commands, and file names."""
    function = "_" + command.words[0].replace("-", "_")
    cases = []

    def add_cases(inner: Command) -> None:
        for below in inner.commands:
            add_cases(below)
        words = " ".join([below.words[-1] for below in inner.commands] + inner.flags())
        cases.append(f"    '{' '.join(inner.words[1:])}'*) words='{words}' ;;")

    add_cases(command)
    # ds-launch's own flags end where its program begins, whose arguments are its own.
    stop = "" if command.commands else f"""  local index
  for ((index = 1; index < COMP_CWORD; ++index)); do
    case ${{COMP_WORDS[index]}} in
      --) return ;;
      -* | =) ;;
      *) [[ ${{COMP_WORDS[index - 1]}} == -* || ${{COMP_WORDS[index - 1]}} == = ]] || return ;;
    esac
  done
"""
    lines = "\n".join(cases)
    return f"""# bash completion of {command.words[0]}, made from its --help.
{function}() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
{stop}  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
{lines}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -o bashdefault -F {function} {command.words[0]}
"""


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    folder = sys.argv[3]
    os.makedirs(folder, exist_ok=True)
    for program in sys.argv[1:3]:
        name = os.path.basename(program)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
        command = describe(program, [name])
        with open(os.path.join(folder, f"{name}.1.gz"), "wb") as file:
            file.write(gzip.compress(manual_page(command, version).encode(), mtime=0))
        with open(os.path.join(folder, f"{name}.bash"), "w", encoding="utf-8") as file:
            file.write(completion(command))


if __name__ == "__main__":
    main()

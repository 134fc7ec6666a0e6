"""What the GPT of examples/gpt writes with --metrics."""
import json
import os


def losses_of(path):
    """Step -> loss as written, of the lines that are whole; of a step that was made again, the later."""
    found = {}
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                if line.endswith("\n") and "step" in (entry := json.loads(line)):
                    found[entry["step"]] = entry["loss"]
    return found

"""The notebook's cells do what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path("docs/colab.ipynb")
SHORTER = {
    "STEPS = 200": "STEPS = 4",
    "ANSWERS = 500": "ANSWERS = 4",
    "--data.held-out 8": "--data.held-out 2",
    "--accuracy-prompts 4 --num-prompts 4": "--accuracy-prompts 1 --num-prompts 2",
    "--max-new-tokens 32": "--max-new-tokens 8",
    "--max-rows 16 --finalists 2": "--max-rows 8 --finalists 1",
}


def run_line(line, names):
    """A line for the shell, as a notebook runs it: its own Python, and $NAMES of its variables."""
    words = re.sub(r"\$(\w+)", lambda match: str(names[match[1]]), line.removeprefix("!"))
    command = words.replace("python ", f"{sys.executable} ", 1)
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
def test_every_cell_runs(tmp_path):
    """On the default model, in a folder of its own; what clones and installs is left out."""
    assert all(said in NOTEBOOK.read_text() for said in SHORTER)
    names, printed = {}, ""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code" or set(cell["metadata"].get("tags", ())) & {"setup", "picture"}:
            continue
        source = "".join(cell["source"])
        for said, meant in {"runs/mine": str(tmp_path / "mine"), "\\\n": "", **SHORTER}.items():
            source = source.replace(said, meant)
        if source.startswith("!"):
            printed += "".join(run_line(line, names) for line in source.splitlines())
        else:
            exec(source, names)
    assert printed.count("identical: yes") == 2
    assert names["answer"].text and (tmp_path / "mine" / "training.png").stat().st_size > 5000

"""Programs in answers: extracted from the text, and run with their tests within limits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxspec.errors import UserError

_BLOCK = re.compile(r"^([ \t]*)```([^\n]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_BYTES = 2**30  # of memory that generated code may take
_PASSED = 86  # exit code; code that exits by itself has another
_GUARD = """
import resource, runpy, sys
seconds, size = map(int, sys.argv[1:])
for kind, value in (("CPU", seconds), ("AS", size), ("FSIZE", 2**20), ("CORE", 0), ("NPROC", 0)):
    try:
        hard = resource.getrlimit(getattr(resource, "RLIMIT_" + kind))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
    except (AttributeError, ValueError, OSError):  # a limit that this system does not have
        pass
runpy.run_path("answer.py", run_name="answer")
"""


def extract_code(answer: str, prompt: str, entry_point: str) -> str:
    """The program of an answer to a HumanEval question.

    It is the code block that defines the function, else the first Python block, else the full answer. The prompt holds
    the imports; a bare function body continues the prompt.
    """
    blocks = [  # one in a list is indented as a whole, and so is its code
        re.sub(f"^{margin}", "", code, flags=re.MULTILINE)
        for margin, language, code in _BLOCK.findall(answer)
        if not language.strip() or language.strip().lower().startswith("py")
    ]
    defining = re.compile(rf"^def {re.escape(entry_point)}\b", re.MULTILINE)
    code = next((code for code in blocks if defining.search(code)), blocks[0] if blocks else answer)
    return f"{prompt}\n{code}" if defining.search(code) else prompt + code


def passes(program: str, test: str, entry_point: str, seconds: int = 10) -> bool:
    """Run generated code with its test in a process of its own, within limits of time, memory and file size.

    The process starts in an empty folder, without this process's environment, and may start no other process where the
    system can forbid that. This stops accidents, not attacks: it can still read and write all files of its user.

    Args:
      program: code that defines the function.
      test: code that defines `check`, which takes the function.
      entry_point: the function's name.
      seconds: time limit.
    """
    whole = f"{program}\n\n{test}\n\ncheck({entry_point})\nraise SystemExit({_PASSED})\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "answer.py").write_text(whole, encoding="utf-8")
        command = [sys.executable, "-I", "-c", _GUARD, str(seconds), str(_BYTES)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=folder, env={"PATH": os.defpath}, start_new_session=True, **quiet)
        try:
            return process.wait(seconds) == _PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()


def check_runner() -> None:
    """Raise UserError where this machine cannot run programs, before all of them seem to fail."""
    if not passes("def f():\n    return 1\n", "def check(f):\n    assert f() == 1\n", "f"):
        raise UserError("programs cannot be run here within limits: HumanEval cannot be scored; leave --run-code out")

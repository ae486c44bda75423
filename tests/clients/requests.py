"""Requests that clients have sent: one of each form, with short texts, in files that tests send again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.clients.recorder import Exchange

STORED = Path(__file__).parent / "sent"
_LENGTH = 24  # of a text, and of a prompt of token ids
_LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens"}
_TOKENS = 4  # of an answer, at most


def store(client: str, exchanges: Sequence[Exchange]) -> None:
    """Store the requests of a client in the place of those of an earlier run."""
    found = {_form(one.path, one.fields): {"path": one.path, "body": _short(one.fields)} for one in exchanges}
    STORED.mkdir(exist_ok=True)
    lines = (json.dumps(request, ensure_ascii=False, sort_keys=True) + "\n" for request in found.values())
    (STORED / f"{client}.jsonl").write_text("".join(lines), encoding="utf-8")


def stored() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Client, path and body of every stored request."""
    for file in sorted(STORED.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            request = json.loads(line)
            yield file.stem, request["path"], request["body"]


def _form(path: str, value: Any) -> str:
    """The names and types of a request, alike for requests that differ in texts and numbers alone."""
    if isinstance(value, dict):
        return path + "{" + ",".join(_form(name, value[name]) for name in sorted(value)) + "}"
    if isinstance(value, list):
        return path + "[" + ",".join(sorted({_form("", one) for one in value})) + "]"
    return f"{path}:{type(value).__name__}"


def _short(value: Any, name: str = "") -> Any:
    """A request with short texts and answers."""
    if isinstance(value, dict):
        return {field: _short(one, field) for field, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value[:_LENGTH]]
    if isinstance(value, str):
        return value[:_LENGTH]
    return min(value, _TOKENS) if name in _LIMITS and value is not None else value

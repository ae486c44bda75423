"""The keys of a config.json, each checked where it is read: what makes no sense is one line that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import UserError

MOST_POSITIONS = 2**31 - 1  # they are 32-bit numbers
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, without a window and with one
_LEAST, _MOST = 1e-30, 3e38  # what float32 holds, with some room below


class Keys:
    """The content of a config.json, or of a part of it.

    Args:
      content: the JSON object.
      defaults: values of keys that it leaves out.
      where: the file, for messages.
      names: what it calls some keys.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        defaults: Mapping[str, Any],
        where: str,
        names: Mapping[str, str] | None = None,
    ):
        self.content, self.defaults, self.where, self.names = content, defaults, where, names or {}

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is."""
        return self.content.get(self.names.get(key, key), self.defaults.get(key, default))

    def error(self, key: str, wanted: str) -> UserError:
        """What to raise for a value: which one, and what it must be."""
        return UserError(f"{self.where}: {self.names.get(key, key)} must be {wanted}, got {self.get(key)!r:.80}")

    def required(self, key: str) -> Any:
        """A value that has no default."""
        name = self.names.get(key, key)
        if name not in self.content and key not in self.defaults:
            raise UserError(f"{self.where}: key {name!r} is missing")
        return self.get(key)

    def count(self, key: str, most: int, least: int = 1) -> int:
        """A whole number."""
        value = self.required(key)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or not least <= value <= most:
            raise self.error(key, f"a whole number from {least} to {most}")
        return int(value)

    def number(self, key: str, least: float = _LEAST, most: float = _MOST) -> float:
        """A positive number, within bounds."""
        value = self.required(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise self.error(key, f"a positive number from {least:g} to {most:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """So many positive numbers."""
        values = self.required(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"a list of {count} numbers")
        one_each = Keys({f"{key}[{i}]": value for i, value in enumerate(values)}, {}, self.where)
        return tuple(one_each.number(name) for name in one_each.content)

    def optional_count(self, key: str, most: int) -> int | None:
        """A whole number, or None for null and where the key is left out."""
        return None if self.get(key) is None else self.count(key, most)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None for null and where the key is left out."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false; null and a key that is left out are false."""
        value = self.get(key)
        if value not in (None, True, False):
            raise self.error(key, "true or false")
        return bool(value)

    def choice(self, key: str, known: Mapping[str, Any]) -> Any:
        """What a word stands for."""
        value = self.required(key)
        if not isinstance(value, str) or value not in known:
            name, supported = self.names.get(key, key), ", ".join(known)
            raise UserError(f"{self.where}: {name} {value!r:.80} is not supported; supported: {supported}")
        return known[value]

    def part(self, key: str) -> Keys:
        """An object within; an empty one for null and where the key is left out."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "an object")
        return Keys(value or {}, {}, f"{self.where}: {key}")

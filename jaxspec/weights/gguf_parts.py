"""The content of a GGUF file, or of all parts of one that was split: metadata and tensors, mapped into memory.

Part 1 of a split file holds the metadata, and every part says which one it is (split.no, from 0) of how many
(split.count). Their names end in -00001-of-00002.gguf and so on.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from jaxspec.errors import UserError

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMENSIONS = 4096, 20_000, 4
_MAX_TEXT = 16 * 2**20  # bytes, of a key, a name, a value
_MAX_ITEMS = 2**21  # of an array, such as the merges of a vocabulary


class _Reader(GGUFReader):
    """Reads arrays whole: a vocabulary and its merges have a hundred thousand entries.

    It does so through a plain array, since slices of a memory map are three times as slow. Raises ValueError for counts
    that no file of weights has, before anything is read that often.
    """

    @property
    def data(self) -> np.ndarray:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)

    def _build_fields(self, offset: int, count: int) -> int:
        return super()._build_fields(offset, _checked(count, _MAX_KEYS, "metadata keys"))

    def _build_tensor_info(self, offset: int, count: int) -> tuple[int, list[ReaderField]]:
        return super()._build_tensor_info(offset, _checked(count, _MAX_TENSORS, "tensors"))

    def _get_tensor_info_field(self, offset: int) -> ReaderField:
        dimensions = offset + 8 + self._get_str(offset)[1].size
        _checked(self._get(dimensions, np.uint32)[0], _MAX_DIMENSIONS, "dimensions of a tensor")
        return super()._get_tensor_info_field(offset)

    def _get_str(self, offset: int) -> tuple[np.ndarray, np.ndarray]:
        _checked(self._get(offset, np.uint64)[0], _MAX_TEXT, "bytes of a text")
        return super()._get_str(offset)

    def _get_field_parts(self, offset: int, kind: int) -> tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]:
        """Size in bytes, parts, which of them hold the values, and types of a value."""
        if kind != GGUFValueType.ARRAY:
            return super()._get_field_parts(offset, kind)
        item, count = self._get(offset, np.uint32), self._get(offset + 4, np.uint64)
        kinds, start = [GGUFValueType.ARRAY, GGUFValueType(item[0])], offset + 12
        _checked(count[0], _MAX_ITEMS, "items of an array")
        if kinds[1] in self.gguf_scalar_to_np:
            parts = [self._get(start, self.gguf_scalar_to_np[kinds[1]], count[0])]
            end = start + parts[0].nbytes
        elif kinds[1] == GGUFValueType.STRING:
            parts, end = self._strings(start, int(count[0]))
        else:
            raise ValueError("an array of arrays")
        return end - offset, [item, count, *parts], list(range(2, 2 + len(parts))), kinds

    def _strings(self, at: int, count: int) -> tuple[list[np.ndarray], int]:
        """So many strings as bytes, each stored behind its length in 8 bytes; and where they end."""
        data, order, parts = memoryview(self._data), self.endianess.name.lower(), []
        for _ in range(count):
            start, at = at + 8, at + 8 + int.from_bytes(data[at : at + 8], order)
            if at > len(data) or at - start > _MAX_TEXT:
                raise ValueError("it ends within a list of texts")
            parts.append(self._data[start:at])
        return parts, at


def _checked(count: int, most: int, what: str) -> int:
    if count > most:
        raise ValueError(f"{count} {what}, and at most {most} make sense")
    return int(count)


def read_parts(path: Path) -> tuple[dict[str, ReaderField], list[ReaderTensor]]:
    """Metadata by key and all tensors of a GGUF file; of one in parts, whichever of them is given.

    Raises:
      UserError: the file cannot be read or is truncated, or a part is missing or belongs to another file.
    """
    reader = _read(path)
    number, count = _part(reader)
    if count == 1:
        return reader.fields, reader.tensors
    this, named = f"{path}: this is part {number + 1} of {count} of a GGUF file", _PART.fullmatch(path.name)
    if not named or int(named[2]) != count:
        raise UserError(f"{this}; give all parts their names back, NAME-{number + 1:05}-of-{count:05}.gguf and so on")
    files = [path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(f"{this}, and {', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} missing there")
    parts = [reader if file == path else _read(file) for file in files]
    for i, (file, part) in enumerate(zip(files, parts, strict=True)):
        if _part(part) != (i, count):
            raise UserError(f"{file}: this is not part {i + 1} of {count}; the parts belong to different files")
    return parts[0].fields, [tensor for part in parts for tensor in part.tensors]


def _read(path: Path) -> _Reader:
    try:
        return _Reader(path)
    except Exception as error:  # the reader raises whatever its parsing trips over
        raise UserError(f"{path}: not a complete GGUF file ({error})") from None


def _part(reader: _Reader) -> tuple[int, int]:
    """Which part it is, from 0, and of how many."""
    values = (reader.fields.get(f"split.{key}") for key in ("no", "count"))
    number, count = (0 if field is None else int(field.contents()) for field in values)
    return number, max(count, 1)

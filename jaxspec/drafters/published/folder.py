"""The folder of a published drafter: config.json and tensors, each of which must be read by somebody."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.weights.shards import WEIGHTS, find_shards, read_tensors

CONFIG = "config.json"
CONFIGS = ("adapter_config.json", CONFIG)  # PEFT's name and everybody else's: the first that is there counts
_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_OUTPUTS = ("adapters", "runs")  # folders that commands of this package write into, which are no owners on the hub


class PublishedFolder:
    """A folder with the config.json and the weights of a drafter.

    Tensors are mapped, not read, until they are taken.

    Args:
      path: the folder.
      weights: names of the file of weights, of which the first that is there counts.
      further: names of files with more tensors, which may be there.

    Attributes:
      path: the same.
      config: the content of config.json.
      config_file: its name, for messages.

    Raises:
      UserError: a file is missing, damaged, no JSON object, or a link out of the folder.
    """

    def __init__(self, path: Path, weights: Sequence[str] = WEIGHTS, further: Sequence[str] = ()):
        self.path, self._weights, self._further, self._taken = path, weights, further, set()
        configs = [path / name for name in CONFIGS if os.path.lexists(path / name)]
        if not configs:
            raise UserError(f"{path}: no drafter there, for it has neither {' nor '.join(CONFIGS)}")
        file = configs[0]
        self.config_file = str(file)
        self.config: dict[str, Any] = read_json(self._inside(file))
        if not isinstance(self.config, dict):
            raise UserError(f"{file}: must hold a JSON object")

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors by name. Raises UserError for a name that is there twice."""
        for index in self.path.glob("*.index.json"):
            self._inside(index)
        files = find_shards(self.path, self._weights)
        files += [self.path / name for name in self._further if (self.path / name).exists()]
        tensors = {}
        for name, tensor in read_tensors(self.path, [self._inside(file) for file in files]):
            if name in tensors:
                raise UserError(f"{self.path}: tensor {name!r} is in two files")
            tensors[name] = tensor
        return tensors

    def _inside(self, file: Path) -> Path:
        """The file. Raises UserError for one that lies elsewhere: folders of the hub's cache link to its blobs."""
        folder = self.path.resolve()
        roots = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
        try:
            target = file.resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            raise UserError(f"{file}: cannot be followed: {first_line(error)}") from None
        if not any(target.is_relative_to(root) for root in roots):
            raise UserError(f"{file}: leads out of the folder, to {target}; copy the file there")
        return file

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None where there is none of that name."""
        return self.tensors[name].shape if name in self.tensors else None

    def take(self, name: str, shape: Sequence[int], whole: bool = False) -> np.ndarray:
        """A tensor, as the file has it: of floats, or of whole numbers.

        Raises UserError where it is missing, has another shape or kind, or holds a number that is not finite.
        """
        if name not in self.tensors:
            raise UserError(f"{self.path}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        if tensor.shape != tuple(shape):
            raise UserError(
                f"{self.path}: tensor {name!r} has shape {list(tensor.shape)}, its config.json says {list(shape)}"
            )
        if (tensor.dtype.kind in "iub") != whole:
            wanted = "whole numbers" if whole else "floats"
            raise UserError(f"{self.path}: tensor {name!r} is of {tensor.dtype}, and must be of {wanted}")
        if not whole and not np.all(np.isfinite(tensor)):
            raise UserError(f"{self.path}: tensor {name!r} holds numbers that are not finite")
        self._taken.add(name)
        return tensor

    def leave(self, *names: str) -> None:
        """Tensors that may be there and are not needed."""
        self._taken.update(names)

    def check_all_taken(self) -> None:
        """Raise UserError for a tensor that nobody has read."""
        for name in self.tensors:
            if name not in self._taken:
                raise UserError(f"{self.path}: tensor {name!r} is not one of this form, which would go unread")

    def dtype(self) -> str:
        """The dtype of the floats that were taken: one of 16 bits where all have it, else float32."""
        kinds = {x.dtype for name, x in self.tensors.items() if name in self._taken and x.dtype.kind not in "iub"}
        return str(kinds.pop()) if len(kinds) == 1 and kinds <= {*_FLOATS} else "float32"

    def check_keys(self, known: Sequence[str], content: dict[str, Any] | None = None, part: str = "") -> None:
        """Raise UserError for a key of config.json, or of a part of it, that nobody knows and that says something."""
        for key, value in (self.config if content is None else content).items():
            if key not in known and value is not None:
                raise UserError(f"{self.config_file}: {part}{key!r:.60} {value!r:.60} is not known in this form")


def find_folder(name_or_path: str | Path, files: Sequence[str]) -> Path:
    """The folder of that name, or of the hub's model `owner/name`, of which these files are downloaded.

    Args:
      name_or_path: what a user gave.
      files: names, or patterns of names.

    Raises:
      UserError: there is neither.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.exists():
        return path
    if not is_hub_name(name):
        raise UserError(f"{name}: no such folder, and not a hub name (owner/name, and no folder OWNER here)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # network, authorisation, unknown name: all end here
        raise UserError(
            f"{name}: no such folder, and it could not be fetched from the hub: {first_line(error)}"
        ) from None


def hub_patterns(weights: Sequence[str], further: Sequence[str] = ()) -> tuple[str, ...]:
    """Patterns of the files that a `PublishedFolder` reads, whole or in shards with their index."""
    shards = (f"{Path(name).stem}*{Path(name).suffix}" for name in weights)
    return (*CONFIGS, *shards, *(f"{name}.index.json" for name in weights), *further)


def is_hub_name(name: str) -> bool:
    """Whether a name has the form `owner/name`, and is no path of which only the end is missing."""
    owner, _, rest = name.partition("/")
    path_like = owner.startswith((".", "~")) or owner in _OUTPUTS or Path(owner).is_dir()
    return bool(owner) and bool(rest) and "/" not in rest and not path_like

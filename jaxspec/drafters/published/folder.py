"""The folder of a published drafter: config.json and tensors, each of which must be read by somebody."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.weights.shards import find_shards, read_tensors

CONFIG = "config.json"
_HUB_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin"]
_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


class PublishedFolder:
    """A folder with the config.json and the weights of a drafter.

    Tensors are mapped, not read, until they are taken.

    Args:
      path: the folder.

    Attributes:
      path: the same.
      config: the content of config.json.

    Raises:
      UserError: a file is missing, damaged, no JSON object, or a link out of the folder.
    """

    def __init__(self, path: Path):
        self.path, self._taken = path, set()
        self.config: dict[str, Any] = read_json(self._inside(path / CONFIG))
        if not isinstance(self.config, dict):
            raise UserError(f"{path / CONFIG}: must hold a JSON object")

    @property
    def config_file(self) -> str:
        """For messages."""
        return str(self.path / CONFIG)

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors by name."""
        for index in self.path.glob("*.index.json"):
            self._inside(index)
        shards = [self._inside(shard) for shard in find_shards(self.path)]
        return dict(read_tensors(self.path, shards))

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

        Raises UserError where it is missing, or has another shape or kind.
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


def find_folder(name_or_path: str | Path) -> Path:
    """The folder of that name, or of the hub's model `owner/name`, whose files are downloaded.

    Raises UserError where there is neither.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.exists():
        return path
    if not is_hub_name(name):
        raise UserError(f"{name}: no such folder, and not a hub name (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, authorisation, unknown name: all end here
        raise UserError(
            f"{name}: no such folder, and it could not be fetched from the hub: {first_line(error)}"
        ) from None


def is_hub_name(name: str) -> bool:
    """Whether a name has the form `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")

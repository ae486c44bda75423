"""Command lines parsed into dataclasses, with errors in one sentence; options that commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import jax
import tyro

from jaxspec.config import MeshConfig
from jaxspec.drafters import DrafterSpec, adapter_method, parse_drafter
from jaxspec.errors import UserError, suggest
from jaxspec.model.gpu import has_bfloat16, plain_note
from jaxspec.model.small_products import small_note
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DrafterOptions:
    """A base, and the methods that draft for it.

    Attributes:
      model: smollm2-135m (the default), a Hugging Face directory or hub name, a base written by `jaxspec train` or by
        `jaxspec export`, or a GGUF file.
      method: the drafter: a method, or several joined by a + that draft together, then settings of which the options
        below are short forms, as in --method "medusa+suffix tree=best:5 vocabulary=8192 adapter=DIR". Default that of
        the adapter; without one ppd, in evaluate eagle, in serve hidden_transfer+prompt_lookup.
      adapter: folder of a trained adapter, or folder or hub name of a drafter that other software has trained (see
        `jaxspec import`); default the one that ships for this method and model.
      draft_model: for the method draft_model: a smaller base, named like the model, or the folder of one made of this
        model's layers by `jaxspec train`; default the one that ships for this model.
      draft_adapter: folder of an adapter of PPD for the draft model, which then needs fewer passes for its draft; or
        ppd, for the one that ships.
      template: chat template in place of the tokenizer's: llama2, llama2-short, vicuna, vicuna-short, falcon or
        another of docs/models.md; or variables for the tokenizer's template, as in enable_thinking=false.
      dtype: dtype of the weights, or exact: bfloat16 weights, with everything else as exact as in float32; default
        float32 on CPU, float16 on GPUs that have no bfloat16, bfloat16 elsewhere.
      weights: kernels in few bits, which decode the same text as autoregressive decoding of such a base: int8, a scale
        per column; int4 or int4-64, a scale per 32 or 64 rows of a column. Default: as dtype says.
    """

    model: str = DEFAULT_MODEL
    method: str = ""
    adapter: str = ""
    draft_model: str = ""
    draft_adapter: str = ""
    template: str = ""
    dtype: str = ""
    weights: str = ""
    default_method: ClassVar[str] = "ppd"

    def load_model(self, mesh: MeshConfig = MeshConfig()) -> Model:
        """The base, on a mesh; says on stderr what its device lacks."""
        if note := plain_note():
            print(note, file=sys.stderr)
        return load_base(self.model or DEFAULT_MODEL, self.dtype, mesh, self.template, self.weights)

    def drafter(self, **settings: Any) -> DrafterSpec:
        """The drafter, as --method and its short forms say it; further settings by the names of its fields."""
        folders = {"adapter": self.adapter, "draft": self.draft_model, "draft_adapter": self.draft_adapter}
        folders = {name: folder or None for name, folder in folders.items()}
        method = self.method or (adapter_method(self.adapter) if self.adapter else self.default_method)
        return parse_drafter(method).with_settings(**folders, **settings)


def load_base(name: str, dtype: str, mesh: MeshConfig, template: str, weights: str) -> Model:
    """A base as options name it, an empty one being the default; says on stderr what dtype and weights mean."""
    if not dtype and not has_bfloat16():
        print(f"{jax.devices()[0].device_kind}: computing in float16, for it has no bfloat16", file=sys.stderr)
    model = load_model(name, dtype or None, mesh, template, weights)
    if model.weights and (note := small_note(model.params["lm_head"], mesh.devices > 1)):
        print(note, file=sys.stderr)
    return model


def given_options(options: Any) -> list[str]:
    """The names of the fields of parsed options that differ from their defaults."""
    return [field.name for field in dataclasses.fields(options) if getattr(options, field.name) != field.default]


def program() -> str:
    """The command as it was called, for --help."""
    return Path(sys.argv[0]).name


def parse(kind: type[T], args: Sequence[str], default: T | None = None, prog: str | None = None) -> T:
    """Options from the command line.

    Args:
      kind: dataclass whose fields are the options; a union of several makes a subcommand of each.
      args: the command line.
      default: values of options that are not given.
      prog: name of the program, for --help; default `program()`.

    Raises:
      UserError: an option that does not exist, or a value that does not fit it.
    """
    extra = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                kind,
                args=list(args),
                prog=prog or program(),
                return_unknown_args=True,
                config=(tyro.conf.AvoidSubcommands,),  # a setting that may be None stays what its default is
                **extra,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UserError(_first_paragraph(errors.getvalue())) from None
    if unknown:
        word = unknown[0]
        options = [f"--{name}" for name in _option_names(parsed)]
        raise UserError(f"unknown option {word!r}{suggest(word, options)}; --help lists them all")
    return parsed


def _first_paragraph(box: str) -> str:
    """The sentence inside a drawn box: the text between its title and the next ruled line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()[1:]]
    said = ["" if set(line) == {"-"} else line for line in lines]  # where a terminal knows nothing but ASCII
    return " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, said)))


def _option_names(settings: object, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a dataclass, nested ones included."""
    names, hints = [], get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        given = [note.name for note in get_args(hints[field.name]) if getattr(note, "name", None)]
        name = prefix + (given or [field.name.replace("_", "-")])[0]
        value = getattr(settings, field.name)
        names += _option_names(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return names

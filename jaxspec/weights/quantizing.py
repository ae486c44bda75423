"""Loading a base in few bits: which parameters are quantized, one after the other, and how files' own groups stay."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import UserError, suggest
from jaxspec.model.quantized import GROUPS, Quantized, fits, form_of, is_quantized, quantize

Leaf = Any  # an array or a `Quantized`


def check_form(form: str) -> None:
    """Raise UserError for an unknown form of weights; empty: as `dtype` says."""
    if form and form not in GROUPS:
        raise UserError(f"weights {form!r} are unknown{suggest(form, GROUPS)}; use one of {', '.join(GROUPS)}")


def is_kernel(path: str) -> bool:
    """Whether the parameter at a path is held in few bits; norms, biases and untied embeddings are not."""
    return path.endswith("/kernel") or path == "lm_head"


def small(array: Leaf, path: str, form: str, where: str = "the base") -> Leaf:
    """A parameter in a form, if it is a kernel and not in few bits already.

    Args:
      array: floats [..., in, out].
      path: of the parameter.
      form: one of `GROUPS`, or empty.
      where: the file, for messages.

    Raises:
      UserError: groups do not divide the rows, or the weights are too large for their scales.
    """
    if not form or not is_kernel(path) or is_quantized(array):
        return array
    if not fits(array.shape, form):
        raise UserError(
            f"{where}: {path} has {array.shape[-2]} rows, which are no whole groups of {GROUPS[form]}; "
            "give another form of weights: int8 has a scale per column"
        )
    kernel = _quantize(array, form, jnp.dtype(array.dtype).name)
    if not jnp.isfinite(jnp.max(jnp.abs(kernel.scales))):
        raise UserError(f"{where}: {path} holds weights that are not finite, or too large for {form}")
    return kernel


def small_tree(params: Any, form: str, where: str) -> Any:
    """A base's parameters in a form, as `small` has each of them."""

    def made(path: tuple, leaf: Leaf) -> Leaf:
        return small(leaf, jax.tree_util.keystr(path, simple=True, separator="/"), form, where)

    return jax.tree.map_with_path(made, params, is_leaf=is_quantized)


def small_shapes(params: Any, form: str) -> Any:
    """Shapes and dtypes of a base's parameters in a form. Raises UserError as `small`."""

    def shape_of(path: tuple, leaf: jax.ShapeDtypeStruct) -> Leaf:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not form or not is_kernel(name):
            return leaf
        if not fits(leaf.shape, form):
            small(leaf, name, form)  # refuses it
        make = functools.partial(quantize, form=form, dtype=jnp.dtype(leaf.dtype).name)
        return jax.eval_shape(make, leaf)

    return jax.tree.map_with_path(shape_of, params)


def keeps(kernel: Quantized, form: str) -> bool:
    """Whether a file's own groups stay where a form is asked for: they have as many bits."""
    return bool(form) and form_of(kernel)[:4] == form[:4]


def alike(parts: list[Leaf]) -> list[Leaf]:
    """Parts of one parameter that can be joined: those with groups of different kinds as floats."""
    kinds = {(is_quantized(part), _kind(part)) for part in parts}
    if len(kinds) == 1:
        return parts
    return [np.asarray(part.dense(part.dtype)) if is_quantized(part) else part for part in parts]


def _kind(part: Leaf) -> tuple | None:
    return (part.per_byte, part.group, part.minima is None) if is_quantized(part) else None


_quantize = jax.jit(quantize, static_argnums=(1, 2))

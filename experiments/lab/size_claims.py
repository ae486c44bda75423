"""The part of docs/claims.md about what PPD adds to a base, Table 6.1 and Figure 6.4: parameters and memory."""

from __future__ import annotations

import math
from typing import Any

import jax

from experiments.lab.page import section
from experiments.lab.row_costs import compiled_steps
from jaxspec.bench.needs import readable
from jaxspec.decoding.method import Method, abstract_trainable
from jaxspec.methods import PPD, Eagle, Medusa
from jaxspec.model.decoder import abstract_params
from jaxspec.tuning.steps import SIZES

_PPD, _MEDUSA = PPD(), Medusa(heads=4, lm_head="full")
PUBLISHED = (  # percent of the parameters of base and method together: Table 6.1
    ("1b", "PPD", _PPD, 4.50e-4),
    ("7b", "PPD", _PPD, 1.82e-4),
    ("7b", "Medusa, four heads", _MEDUSA, 8.07),
    ("13b", "PPD", _PPD, 7.87e-5),
    ("13b", "PPD with two prompt tokens, our question", PPD(distances=2), 7.87e-5),
    ("13b", "Medusa, four heads", _MEDUSA, 5.52),
)
_NAMES = {"1b": "1.4B", "7b": "7B", "13b": "13B"}
_PRECISION = 5e-3  # of figures with three digits
_HEAVY = ("medusa", "eagle")  # what the figure has beside PPD, and is compiled here
_NEAR = 0.01  # of the memory, what is nothing to be seen in a figure


def size_sections() -> list[str]:
    """The conclusions."""
    text = (
        "Nothing is trained or measured for these. Parameters are counted in the shapes of each base; memory is what a "
        "step takes that is compiled for an H100: a 7B base in bfloat16, 500 tokens of text, all tokens drafted, 64 "
        "rows, three heads."
    )
    lines = [*(_parameters(*each) for each in PUBLISHED), *_shares(), _memory()]
    return [section("Exploratory: what PPD adds", text, ["claim", "source", "computed", "verdict"], lines)]


def count(tree: Any) -> int:
    """Numbers in a pytree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _own(base: str, method: Method) -> int:
    return count(abstract_trainable(method, SIZES[base]))


def _parameters(base: str, name: str, method: Method, published: float) -> list[str]:
    own = _own(base, method)
    found = 100 * own / (own + count(abstract_params(SIZES[base])))
    text = f"{published:.3g}% of {_NAMES[base]} and it together are parameters of {name}"
    return [text, "PPD, Table 6.1", f"{found:.3g}%, {own:,}", _said(abs(found / published - 1) < _PRECISION)]


def _shares() -> list[list[str]]:
    """What an adapter takes beside others, all in one dtype."""
    own, whole = _own("7b", _PPD), count(abstract_params(SIZES["7b"]))
    medusa, eagle = _own("7b", _MEDUSA), _own("7b", Eagle())
    return [
        _at_most("PPD adds 0.004% of what Medusa adds", "PPD, 6.4.1", own, medusa, 0.004),
        _at_most("PPD adds 0.007% of what Eagle adds; here EAGLE-3", "PPD, 6.4.1", own, eagle, 0.007),
        _at_most("memory in decoding grows by 0.0004%", "PPD, abstract", own, whole, 0.0004),
    ]


def _at_most(text: str, source: str, own: int, other: int, percent: float) -> list[str]:
    found = 100 * own / other
    return [
        text,
        source,
        f"{found:.2g}%, {own:,} of {other:,} parameters",
        _said(found <= percent, ", no more than that"),
    ]


def _memory() -> list[str]:
    """Figure 6.4, of whole steps."""
    needed = {name.split()[0]: step["arguments"] + step["temporaries"] for name, step in compiled_steps().items()}
    plain = needed["1"]  # row
    added = {name: needed[name] - plain for name in ("ppd", *_HEAVY) if name in needed}
    measured = ", ".join(f"{readable(value)} with {name}" for name, value in added.items())
    holds = added["ppd"] <= _NEAR * plain < min(value for name, value in added.items() if name in _HEAVY)
    measured += "".join(f"; {name} not reached" for name in _HEAVY if name not in needed)
    text = "PPD takes about the memory of the base alone, others clearly more"
    return [text, "PPD, Figure 6.4", f"{readable(plain)}, and more: {measured}", _said(holds)]


def _said(holds: bool, more: str = "") -> str:
    return f"**holds**{more}" if holds else "**does not hold**"

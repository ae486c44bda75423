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
_NEAR = 0.01  # of the memory, what is nothing to be seen in a figure


def size_sections() -> list[str]:
    """The conclusions."""
    text = (
        "Nothing is trained or measured for these. Parameters are counted in the shapes of each base. Memory is what a "
        "step takes that is compiled for an H100, weights, cache and temporaries: a 7B base in bfloat16, 500 tokens of "
        "text, all tokens drafted, 64 rows, three heads. *More* is what it takes beyond a step of one row, which is "
        "autoregressive decoding. What the thesis says of memory is judged by memory; shares of parameters, Medusa's "
        "with four heads, stand beside it, and are not judged."
    )
    lines = [*(_parameters(*each) for each in PUBLISHED), *_memory()]
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


def _memory() -> list[list[str]]:
    """What steps take, and beside it what adapters have."""
    needed = {name.split()[0]: step["arguments"] + step["temporaries"] for name, step in compiled_steps().items()}
    plain, rows = needed["1"], needed["64"]  # by rows where nothing is drafted
    more = {name: needed[name] - plain for name in ("ppd", "medusa", "eagle")}
    own, whole = _own("7b", _PPD), count(abstract_params(SIZES["7b"]))
    medusa, eagle = _own("7b", _MEDUSA), _own("7b", Eagle())
    added = ", ".join(f"{readable(value)} with {name}" for name, value in more.items())
    added += f", {readable(rows - plain)} with 64 rows that draft nothing"
    near = more["ppd"] <= _NEAR * plain < min(more["medusa"], more["eagle"])
    return [
        _at_most("runtime memory grows by at most 0.0004%", "PPD, abstract", 0.0004, (more["ppd"], plain), own / whole),
        _at_most(
            "PPD takes at most 0.004% of the memory that Medusa takes more", "PPD, 6.4.1", 0.004,
            (more["ppd"], more["medusa"]), own / medusa,
        ),
        _at_most(
            "PPD takes at most 0.007% of the memory that Eagle takes more; here EAGLE-3", "PPD, 6.4.1", 0.007,
            (more["ppd"], more["eagle"]), own / eagle,
        ),
        [
            f"PPD takes the memory of the base alone within {_NEAR:.0%}, Medusa and Eagle more than that",
            "our reading of PPD, Figure 6.4", f"{readable(plain)}, and more: {added}", _said(near),
        ],
    ]  # fmt: skip


def _at_most(text: str, source: str, percent: float, pair: tuple[int, int], parameters: float) -> list[str]:
    """A claim about a share of memory, with the share of parameters."""
    own, other = pair
    computed = f"{100 * own / other:.2g}%, {readable(own)} of {readable(other)}; of parameters {100 * parameters:.2g}%"
    return [text, source, computed, _said(100 * own <= percent * other)]


def _said(holds: bool) -> str:
    return "**holds**" if holds else "**does not hold**"

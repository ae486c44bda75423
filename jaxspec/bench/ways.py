"""The ways to decode that a benchmark compares: methods with their adapters and trees, and peers."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.bench.config import BenchConfig
from jaxspec.bench.peers import Peer, library, load_peers
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Match
from jaxspec.decoding.generate import Generation, generate
from jaxspec.drafting.adapter import find_shipped
from jaxspec.drafting.drafter import Drafter, autoregressive
from jaxspec.drafting.tree.plan import plan_to_json
from jaxspec.errors import UserError
from jaxspec.methods import METHODS, load_drafter
from jaxspec.weights.load import Model

REFERENCE = "autoregressive"
AGAIN = f"{REFERENCE} again"  # against itself: what a benchmark makes of no difference
_WAY = re.compile(r"(?P<method>\w+)(=(?P<tree>[^@]+))?(@(?P<vocabulary>\d+))?")


@dataclasses.dataclass(frozen=True)
class Way(abc.ABC):
    """One way to decode.

    Attributes:
      name: as the user wrote it.
      info: adapter, tree and draft vocabulary, as plain values; `reference`, the way it is compared with.
    """

    name: str
    info: dict[str, Any]

    @property
    def reference(self) -> str:
        """The way that decodes the same base autoregressively."""
        return self.info.get("reference", REFERENCE)

    @property
    def own(self) -> Model | None:
        """The base that the method has tuned, where it has."""
        return None

    @property
    def bytes(self) -> int:
        """Held beside the base."""
        return 0

    @abc.abstractmethod
    def same_text(self, config: BenchConfig, temperature: float) -> bool:
        """Whether it owes the text of its reference."""

    @abc.abstractmethod
    def answer(
        self, model: Model, prompts: Sequence[Sequence[int]], config: BenchConfig, sampling: SamplingConfig, seed: int
    ) -> list[Generation]:
        """Answer prompts together."""


@dataclasses.dataclass(frozen=True)
class MethodWay(Way):
    """A method of jaxspec.

    Attributes:
      drafter: method, adapter and tree.
    """

    drafter: Drafter

    @property
    def drafts(self) -> bool:
        """Whether there is anything to verify."""
        return self.drafter.plan.depth > 0

    @property
    def own(self) -> Model | None:
        """As the drafter says."""
        return self.drafter.model if self.drafter.tuned_base else None

    @property
    def bytes(self) -> int:
        """Adapter, trees, and a base of its own."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.drafter.on_device, self.own and self.own.params)))

    def same_text(self, config: BenchConfig, temperature: float) -> bool:
        """As the acceptance rule says."""
        return ACCEPTANCES[config.accept]().same_text(temperature)

    def answer(
        self, model: Model, prompts: Sequence[Sequence[int]], config: BenchConfig, sampling: SamplingConfig, seed: int
    ) -> list[Generation]:
        """With the acceptance rule that is asked for."""
        # Who drafts nothing has nothing to accept, and its own text is the base's, whatever the rule.
        acceptance = ACCEPTANCES[config.accept]() if self.drafts else Match()
        settings = {"sampling": sampling, "seed": seed, "acceptance": acceptance, "batch_size": len(prompts)}
        return generate(self.drafter, prompts, config.max_new_tokens, **settings)


@dataclasses.dataclass(frozen=True)
class PeerWay(Way):
    """Another library.

    Attributes:
      peer: it.
    """

    peer: Peer

    def same_text(self, config: BenchConfig, temperature: float) -> bool:
        """Its noise is another one."""
        return not temperature

    def answer(
        self, model: Model, prompts: Sequence[Sequence[int]], config: BenchConfig, sampling: SamplingConfig, seed: int
    ) -> list[Generation]:
        """With its own weights, a copy of the base's."""
        return self.peer(prompts, config.max_new_tokens, sampling, seed)


def parse_ways(config: BenchConfig, model: Model) -> dict[str, Way]:
    """The ways to compare by name, autoregressive decoding first.

    Raises:
      UserError: what `methods` or `adapters` say cannot be read or does not fit the base.
    """
    given = [parse_adapter(text) for text in config.adapters.split(",") if text]
    adapters = dict(given)
    if len(adapters) < len(given):
        raise UserError(f"adapters: one folder for each method, got {config.adapters!r}")
    shipped = [name for name in METHODS if name in adapters or find_shipped(name, model.fingerprint)]
    texts = re.split(r",\s*(?=[a-z_])", config.methods) if config.methods else shipped  # commas in a tree: numbers
    if not texts and not config.peers:
        raise UserError(
            f"no adapter ships for {model.name!r}, and there is nothing else to compare: train one with train.py and "
            "give --adapters METHOD=FOLDER, or name --methods"
        )
    plain = autoregressive(model)
    ways: dict[str, Way] = {REFERENCE: MethodWay(REFERENCE, {}, plain)}
    used = set()
    for text in map(str.strip, texts):
        match = _WAY.fullmatch(text)
        if not match:
            raise UserError(f"method {text!r}: expected METHOD, METHOD=TREE or METHOD=TREE@DRAFT-VOCABULARY")
        name = AGAIN if text == REFERENCE in used else text
        if name in ways and name != REFERENCE:
            raise UserError(f"method {text!r} is named too often")
        if name != text:
            ways[name] = MethodWay(name, {}, plain)
        elif text != REFERENCE:
            way = _way(text, model, config, adapters.get(match["method"]), **match.groupdict())
            if way.own:  # it owes the text of the base that it has tuned
                plain_own = MethodWay(way.reference, {"reference": way.reference}, autoregressive(way.own))
                ways.setdefault(way.reference, plain_own)
            ways[text] = way
        used.add(match["method"])
    if adapters.keys() - used:
        raise UserError(f"adapters: {', '.join(sorted(adapters.keys() - used))} is not among the methods")
    peers = load_peers(model, config.assistant) if config.peers else {}
    return ways | {name: PeerWay(name, {"library": library()}, peer) for name, peer in peers.items()}


def parse_adapter(text: str) -> tuple[str, str]:
    """Method and folder of METHOD=FOLDER. Raises UserError for anything else."""
    method, equals, folder = text.partition("=")
    if not equals or method not in METHODS:
        raise UserError(f"adapters: expected METHOD=FOLDER, got {text!r}")
    return method, folder


def _way(
    name: str, model: Model, config: BenchConfig, folder: str | None, method: str, tree: str | None,
    vocabulary: str | None,
) -> MethodWay:  # fmt: skip
    count = int(vocabulary) if vocabulary else None
    tuning = {"batch_size": config.batch_size, "temperature": config.temperature}
    drafter = load_drafter(method, model, folder, tree=tree, draft_vocabulary=count, **tuning)
    info: dict[str, Any] = {"tree": drafter.note, "note": f"{name}: {drafter.note}"}
    if not drafter.note:
        info = {"tree": plan_to_json(drafter.plan)}
    info |= {"adapter": drafter.adapter.digest} if drafter.adapter else {}
    info |= {"draft_vocabulary": drafter.draft_vocabulary, "rows": drafter.num_rows}
    info |= (
        {"accuracy": drafter.adapter.info["accuracy"]} if drafter.adapter and "accuracy" in drafter.adapter.info else {}
    )
    if drafter.tuned_base:
        info |= {"reference": f"{REFERENCE}, base of {method}"}
    return MethodWay(name, info, drafter)

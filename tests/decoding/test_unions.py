"""Drafts chosen per step, of one source or of several, are lossless; and what cannot be joined is refused."""

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Rejection, Typical
from jaxspec.decoding.draft import Offer
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Facts, Method
from jaxspec.drafters import METHODS, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.drafter import FREE_ROWS, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, generate_many
from jaxspec.methods import (
    PPD,
    SPACE,
    Amphista,
    BiTA,
    DFlash,
    DraftModel,
    Eagle,
    HiddenTransfer,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Mtp,
    PromptLookup,
    Rest,
    SelfSpeculative,
    Suffix,
    TokenRecycling,
)
from tests.helpers.decoding import begin
from tests.helpers.marks import slow_ones
from tests.helpers.methods import trained, union
from tests.helpers.tiny import TINY, make_prompts

GREEDY, SAMPLING = SamplingConfig(), SamplingConfig(1.3, top_k=9, top_p=0.95)


@dataclasses.dataclass(frozen=True)
class Guesses(Method):
    """Offers at random, a trie or independent ones: right, wrong, equal, absent, the end of the text and token 0."""

    name: ClassVar[str] = "guesses"

    seed: int = 0
    joined: bool = False
    distances: int = 4
    width: int = 5

    def facts(self, config):
        return Facts(self.distances)

    def offer(self, context, method_state):
        def one(root, position):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), position), root)
            keys, shape = jax.random.split(key, 4), (self.distances, self.width)
            tokens = jnp.argsort(jax.random.uniform(keys[0], (self.distances, 16)))[:, : self.width]
            known = jax.random.bernoulli(keys[1], 0.7, shape) & jax.random.bernoulli(keys[1], 0.8)
            log_p = jnp.log(jnp.round(4 * jax.random.uniform(keys[2], shape)) / 4)  # ties, and some without a chance
            return tokens, known, log_p, jax.random.randint(keys[3], shape, 0, self.width)

        tokens, known, log_p, parent = jax.vmap(one)(context.root, context.position)
        return Offer(tokens.astype(jnp.int32), known, log_p, parent if self.joined else None)


@dataclasses.dataclass(frozen=True)
class Others(Guesses):
    """Another source of the kind."""

    name: ClassVar[str] = "others"


@dataclasses.dataclass(frozen=True)
class Coin(Guesses):
    """Offers token 5 at every distance, with a chance of 1/2."""

    name: ClassVar[str] = "coin"

    def offer(self, context, method_state):
        shape = (len(context.root), self.distances, 1)
        return Offer(jnp.full(shape, 5), jnp.full(shape, True), jnp.full(shape, jnp.log(0.5)), jnp.zeros(shape, int))


def check(drafter, prompts, sampling, batch_size, limit=24, **settings):
    """The text of autoregressive decoding, with candidates taken and refused."""
    plain = generate(autoregressive(drafter.model), prompts, limit, sampling=sampling, seed=3)
    ours = generate(drafter, prompts, limit, sampling=sampling, seed=3, batch_size=batch_size, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    accepted, offered = (np.sum([getattr(a, name) for a in ours], axis=0) for name in ("accepted", "offered"))
    assert 0 < accepted[0] < offered[0]
    return ours


TRAINED = [PPD(), BiTA(prompts=3), SPACE(distances=3, tuning="none"), HiddenTransfer(layers=(0, 1, 2))]
TRAINED += [Medusa(heads=3), Hydra(heads=3), Amphista(heads=3)]
TRAINED += [Eagle(depth=3, confidence=0.1), DFlash(block=3, layers=2, markov_rank=4, confidence_head="markov"), Mtp()]
TRAINED += [DraftModel(layers=(0, 2), length=3, beam=2)]
# what drafts on and on is cut short: every level of a draft is compiled
LOOKUP, SUFFIX, REST = PromptLookup(length=4), Suffix(length=4), Rest(size=300, length=4)
TOKEN_RECYCLING = TokenRecycling(length=4)
SELF = SelfSpeculative(length=3, skip_attention=(1,), skip_mlp=(0,), threshold=0.1)
ALONE = [*TRAINED, LOOKUP, SUFFIX, REST, TOKEN_RECYCLING, Lookahead(), Jacobi(), SELF]


def every_pair(methods):
    """The fewest unions of five, each with the further rows of one method at most, in which every two methods meet."""
    pairs = {five: {*itertools.combinations(five, 2)} for five in itertools.combinations(methods, 5)}
    pairs = {five: met for five, met in pairs.items() if sum(m.facts(TINY).adds_rows for m in five) < 2}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda five: len(pairs[five] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


FIRST = 7  # of these unions, so many have every method in one


def test_the_first_unions_have_every_method():
    assert set(itertools.chain(*every_pair(ALONE)[:FIRST])) == set(ALONE)


def name_of(value):
    if isinstance(value, SamplingConfig):
        return "sampling" if value.temperature else "greedy"
    if isinstance(value, int):
        return f"batch_{value}"
    return "+".join(method.name for method in value) if isinstance(value, tuple) else value.name


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=name_of)
def test_offers_at_random_change_nothing(tiny, sampling):
    """Rejections, ends of text inside a draft, token 0, limits, ties and empty offers, through one program."""
    drafter = union([Guesses(0), Others(1, joined=True, distances=6)], tiny, 9)
    answers = check(drafter, make_prompts(40), sampling, 8)
    assert any(a.tokens[-1] in tiny.eos and a.drafted[-1] for a in answers)
    assert any(0 in a.tokens for a in answers) and any(a.new_tokens == 24 for a in answers)
    assert sum(a.compile_seconds > 0 for a in answers) <= 16  # of five batches two lengths of prompts at most
    for answer in answers:
        assert_every_source_has_its_own_counts(answer, drafter.on_device.shape.depth)
    endless = dataclasses.replace(drafter, model=dataclasses.replace(tiny, eos=(-1,)))
    for limit in (1, 2, 3):
        short = generate(endless, make_prompts(8), limit, sampling=sampling, batch_size=8)
        assert [(a.new_tokens, a.compile_seconds) for a in short] == [(limit, 0)] * 8


def assert_every_source_has_its_own_counts(answer, depth):
    """Of `guesses` and `others`: what each offered, what was taken, and whose the tokens are."""
    assert list(answer.sources) == ["guesses", "others"]
    for bit, stats in zip((1, 2), answer.sources.values(), strict=True):
        emitted = sum(sources & bit > 0 for sources in answer.drafted_by)
        assert emitted <= sum(stats.accepted) <= emitted + depth  # the last step is cut
        for d, (offered, accepted, expected) in enumerate(zip(*dataclasses.astuple(stats), strict=True)):
            assert accepted <= offered <= answer.offered[d] and accepted <= answer.accepted[d]
            assert 0 <= expected <= offered + 1e-4 and (offered > 0 or expected == 0)
    both = zip(*(stats.accepted for stats in answer.sources.values()), answer.accepted, strict=True)
    assert all(max(one, other) <= total <= one + other for one, other, total in both)


def test_expected_acceptances_are_the_chances_of_candidates(tiny):
    """A source that always offers one token of chance 1/2 expects half of its offers at every depth."""
    [answer] = generate(union([Coin()], tiny, 4), make_prompts(1), 24)
    stats = answer.sources["coin"]
    assert stats.offered[0] == answer.steps
    np.testing.assert_allclose(stats.expected, np.multiply(stats.offered, 0.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("methods", "tree"),
    [
        ([Guesses(0)], "best:1@20,3@23,9@44"),
        pytest.param([Guesses(0), Guesses(1, joined=True, distances=6)], "best:1@20,3@25,9@36", marks=pytest.mark.slow),
    ],
    ids=["one", "two"],
)
def test_a_size_chosen_per_step_changes_nothing(tiny, methods, tree):
    drafter = union(methods, tiny, 9).with_tree(tree)
    prompts, sizes = [(prompt * 8)[:8] for prompt in make_prompts(8)], set()
    plain = generate(autoregressive(tiny), prompts, 24, sampling=SAMPLING, seed=3)
    for prompt, answer in zip(prompts, plain, strict=True):
        decoding, state = begin(drafter, [prompt], 24, SAMPLING, seeds=3)
        while not state.done.all():
            sizes.add(int(state.draft.size[0]))
            state = decode(decoding, state, 1)
        assert state.tokens[0, : state.counts[0]].tolist() == answer.tokens
    assert sizes == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("method", "tree"),
    [(Guesses(0), "best:1@20,3@23,9@44"), (Eagle(depth=3, confidence=0.1), "best:9")],
    ids=["sizes", "levels"],
)
def test_free_rows_are_masked_without_conditions(tiny, monkeypatch, method, tree):
    answers, conditions, prompts = [], [], make_prompts(4)
    for rows in (0, 32):
        monkeypatch.setitem(FREE_ROWS, "cpu", rows)
        drafter = union([method], tiny, 9).with_tree(tree)
        answers.append([(a.tokens, a.steps, a.offered) for a in generate(drafter, prompts, 24, seed=3)])
        program = decode.lower(*begin(drafter, prompts[:1], 24, GREEDY, seeds=3), 1).compile().as_text()
        conditions.append(program.count(" conditional("))
    assert answers[0] == answers[1]
    assert conditions[0] > conditions[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "batch_size"),
    [
        pytest.param((HiddenTransfer(layers=(0, 1, 2)), LOOKUP), 4, id="late"),
        pytest.param((PPD(ensemble=2), TOKEN_RECYCLING), 1, id="early"),
    ],
)
def test_all_sizes_have_the_probes(tiny, methods, batch_size):
    """However few nodes there are: else nothing would be drafted after the smallest size."""
    drafter = union(methods, tiny, 14).with_tree("best:7@20,9@21,14@23")
    check(drafter, make_prompts(8), GREEDY, batch_size)


def test_every_method_is_here():
    assert {method.name for method in ALONE} == {name for name, cls in METHODS.items() if cls().facts(TINY).distances}


# all others are joined below, which leaves fewer programs to compile
SINGLE = [m for m in ALONE if m.name in ("amphista", "eagle", "hidden_transfer", "draft_model")]


@pytest.mark.parametrize("method", slow_ones(SINGLE, ("eagle", "hidden_transfer")))
def test_a_source_alone(tiny, method):
    check(union([method], tiny, 8), make_prompts(8), GREEDY, 4)


@pytest.mark.parametrize(
    ("methods", "sampling", "batch_size"),
    [
        ((HiddenTransfer(layers=(0, 1, 2)), LOOKUP), GREEDY, 1),
        ((Medusa(heads=3), TOKEN_RECYCLING), SAMPLING, 4),
        pytest.param((Hydra(heads=3), TOKEN_RECYCLING), SAMPLING, 4, marks=pytest.mark.slow),
        *(
            pytest.param(methods, *setting, marks=[pytest.mark.slow, *marks])
            for methods, setting, marks in zip(
                every_pair(ALONE),
                itertools.cycle([(GREEDY, 4), (SAMPLING, 1)]),
                itertools.chain([[]] * FIRST, itertools.repeat([pytest.mark.exhaustive])),
                strict=False,
            )
        ),
    ],
    ids=name_of,
)
def test_unions(tiny, methods, sampling, batch_size):
    """In the exhaustive tests every method meets every other that it can be joined with, in the slow ones some."""
    check(union(methods, tiny, 9), make_prompts(8), sampling, batch_size)


@pytest.mark.slow
def test_a_union_drafts_what_any_of_its_sources_does(tiny):
    """On a text that repeats itself the lookup is right where the heads are not, and sometimes the other way round."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(8)
    alone = [union([method], model, 6) for method in (Medusa(heads=3), LOOKUP)]
    joined = union([Medusa(heads=3), LOOKUP], model, 9)
    steps = [sum(a.steps for a in generate(drafter, prompts, 60)) for drafter in (*alone, joined)]
    assert steps[2] < min(steps[:2])


@pytest.mark.slow
def test_rows_that_are_refilled_begin_anew(tiny):
    drafter, prompts = union([HiddenTransfer(layers=(0, 1, 2)), LOOKUP], tiny, 8), make_prompts(7)
    plain = [a.tokens for a in generate(autoregressive(tiny), prompts, 24)]
    ours = generate_many(drafter, prompts, 24, batch_size=3, refill=2, steps_per_chunk=3)
    assert dict(ours) == dict(enumerate(plain))


@pytest.mark.slow
def test_other_ways_to_accept(tiny):
    """Chosen candidates are point masses: rejection sampling is the base's own draw. Typical acceptance takes more."""
    drafter, prompts = union([Medusa(heads=3), LOOKUP], tiny, 7), make_prompts(6)
    check(drafter, prompts, SAMPLING, 3, acceptance=Rejection())
    lossy = generate(drafter, prompts, 24, sampling=SAMPLING, acceptance=Typical(epsilon=1e-3))
    matched = generate(drafter, prompts, 24)
    assert np.mean([a.tokens_per_step for a in lossy]) > np.mean([a.tokens_per_step for a in matched])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("medusa+promt_lookup", {}, "unknown method 'promt_lookup' (did you mean 'prompt_lookup'?)"),
        ("prompt_lookup+prompt_lookup", {}, "prompt_lookup is there twice"),
        ("ppd+bita", {}, "only one method of a union can have probes or a window, got ppd and bita"),
        ("ppd+lookahead", {}, "only one method of a union can have probes or a window, got ppd and lookahead"),
        ("lookahead:windows=3", {}, "lookahead has no setting 'windows' (did you mean 'window'?)"),
        ("lookahead:window", {}, "window must be a whole number, got ''"),
        ("suffix:fading=much", {}, "fading must be a number, got 'much'"),
        ("medusa:heads=3", {}, "the settings of medusa are those of its adapter"),
        ("lookahead:window=0", {}, "lookahead: window must be at least 1, got 0"),
        ("lookahead:ngram=0", {}, "lookahead: ngram must be at least 2, got 0"),
        ("lookahead:guesses=0", {}, "lookahead: guesses must be at least 1, got 0"),
        ("lookahead", {"tree": "best:6"}, "best:6: a draft needs 7 rows, the root, a candidate and the method's own"),
        ("self_speculative", {}, "needs an adapter that `jaxspec tune` builds: run it and give its folder"),
        ("autoregressive+prompt_lookup", {}, "autoregressive drafts nothing, leave it out"),
        ("", {}, "unknown method ''"),
        ([], {}, "unknown method ''"),
        ("lookahead:window=5000,ngram=9", {}, "a draft of 40024 rows is larger than the largest, 4096"),
        ("prompt_lookup", {"tree": "best:1"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:0"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:4097"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:many"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:1@2,8"}, "of several sizes each needs its milliseconds"),
        ("prompt_lookup", {"tree": "best:8,1"}, "write best:ROWS with 2 to 4096 rows"),
        ("prompt_lookup", {"tree": "best:8@2,4@1"}, "sizes must be given in order"),
        ("prompt_lookup", {"tree": "best:0@2,4@1"}, "sizes must be given in order"),
        ("prompt_lookup", {"tree": "best:1@0,4@1"}, "of several sizes each needs its milliseconds"),
        ("prompt_lookup", {"tree": "best:1@2,4@-1"}, "write best:ROWS with 2 to 4096 rows"),
        ("autoregressive", {"tree": "best:8"}, "autoregressive drafts nothing and has no tree, got 'best:8'"),
        ("prompt_lookup", {"adapter": "somewhere"}, "prompt_lookup takes no adapter, got 'somewhere'"),
        ("suffix+prompt_lookup", {"adapter": "somewhere"}, "suffix+prompt_lookup takes no adapter, got 'somewhere'"),
        (
            "medusa+rest",
            {"adapter": "somewhere"},
            "somewhere: no such folder, and so no adapter there",
        ),
        ("medusa+rest", {"adapter": "adapters/ppd-smollm2-135m"}, "belongs to method 'ppd', not to medusa or rest"),
        ("suffix+rest", {"adapter": "adapters/ppd-smollm2-135m"}, "belongs to method 'ppd', not 'rest'"),
        ("suffix+rest", {}, "rest needs an adapter that `jaxspec datastore` builds: run it and give its folder"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, name, settings, message):
    with pytest.raises(UserError) as error:
        load_drafter(name, tiny, **settings)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("other", [Medusa(heads=3), SPACE(distances=3, rank=2)], ids=name_of)
def test_a_given_adapter_goes_to_the_method_that_it_names(tiny, tmp_path, monkeypatch, other):
    """The other method takes what ships, also where it tunes the base: a datastore is of tokens, not of weights."""
    frequent = np.arange(8, dtype=np.int32)
    for method in (other, REST):
        adapter = Adapter(method, trained(method, tiny.base), tiny.fingerprint, {"tree": [[0]]}, frequent)
        save_adapter(tmp_path / method.name, adapter)
    folder = tmp_path / "rest"
    with pytest.raises(UserError, match=f"no adapter of {other.name} ships for 'tiny'"):
        load_drafter([other.name, "rest"], tiny, folder)
    with pytest.raises(UserError, match="rest needs an adapter"):
        load_drafter([other.name, "rest"], tiny, tmp_path / other.name)
    monkeypatch.setattr("jaxspec.drafters.loading.find_shipped", lambda name, fingerprint: tmp_path / name)
    drafter = load_drafter([other.name, "suffix", "rest"], tiny, folder, draft_vocabulary=8)
    assert [source.adapter and source.adapter.folder.name for source in drafter.sources] == [other.name, None, "rest"]
    assert [source.draft_vocabulary for source in drafter.sources] == [8, 0, 0]  # a datastore has none
    assert (drafter.model is tiny) == (other.name == "medusa")


def test_a_union_takes_no_fixed_tree(tiny):
    drafter = union([Guesses(0), Guesses(1)], tiny, 8)
    with pytest.raises(UserError, match="a union takes a tree of auto, own or best:ROWS, got 'chain:2'"):
        drafter.with_tree("chain:2")
    with pytest.raises(UserError, match="this takes fixed trees, not best:8"):
        _ = drafter.plan
    with pytest.raises(UserError, match="this takes one method, not 2"):
        _ = drafter.source
    assert drafter.with_tree(None).num_rows == 8 and drafter.with_tree("best:16").num_rows == 16


def test_kernels_are_laid_out_for_the_smallest_step(tiny):
    several = union([LOOKUP], tiny, 8).with_tree("best:2@1,8@2")
    assert (several.least_rows, several.num_rows, union([LOOKUP], tiny, 8).least_rows) == (2, 8, 8)


def test_a_budget_counts_the_rows_of_probes(tiny):
    drafter = union([PPD(ensemble=2)], tiny, 8)  # a probe of two rows
    assert (drafter.num_nodes, drafter.num_rows) == (6, 8)
    assert union([PPD(ensemble=2)], tiny, 30).num_nodes == 30 - 2 * 6  # two owners with three of them
    with pytest.raises(UserError, match="best:3: a draft needs 4 rows, the root, a candidate and its probes"):
        drafter.with_tree("best:3")
    with pytest.raises(UserError, match="best:6@1,14@2: a size needs 7 rows, the root and all probes"):
        drafter.with_tree("best:6@1,14@2")


def test_a_union_has_rows_for_the_probes_of_a_node(tiny):
    assert union([PPD(ensemble=9), LOOKUP], tiny, 40).with_tree(None).num_rows == 11

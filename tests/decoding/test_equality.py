"""Lossless: every method emits, token for token, what autoregressive decoding of its base emits."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jaxspec.weights.load
from jaxspec.config import RopeScaling, SamplingConfig
from jaxspec.decoding.generate import generate
from jaxspec.drafting.drafter import autoregressive
from jaxspec.drafting.tree import (
    State,
    build_tree,
    cartesian,
    efficient,
    make_plan,
    pad_tree,
    random_tree,
    sparse_tree,
    stack_trees,
    straightforward,
)
from jaxspec.methods import (
    METHODS,
    PPD,
    SPACE,
    Amphista,
    BiTA,
    DFlash,
    Eagle,
    HiddenTransfer,
    Hydra,
    Medusa,
    PromptLookup,
    Rest,
    Suffix,
    TokenRecycling,
)
from jaxspec.model.base import Base
from tests.helpers.methods import untrained_drafter
from tests.helpers.tiny import TINY, make_prompts, make_tiny

GREEDY = SamplingConfig()
SAMPLING = [SamplingConfig(1.0), SamplingConfig(1.5, top_k=5, top_p=0.9, min_p=0.02)]
WIDE = [(a,) for a in range(6)] + [(a, b) for a in range(3) for b in range(4)] + [(0, 0, c) for c in range(5)]
NARROW = [(0,), (0, 0), (0, 0, 0)]  # shared noise makes draft and base agree: a wide tree would never be refused

# Every option of every method that decoding can tell apart. A new method or setting without an entry here, or among
# those of training, fails test_every_method_and_setting_is_covered.
OPTIONS = {
    PPD: {
        "distances": (3, 2),
        "ensemble": (1, 3),
        "mask": ("ensemble", "decoder", "encoder"),
        "aggregation": ("average", "learned"),
        "prefix_tokens": (0, 2),
        "head": ("none", "one_stage"),  # one trained in two stages decodes likewise
        "multi_exit": (1, 2),
        "entry": (0, 1),
    },
    BiTA: {
        "distances": (3, 2),
        "prompting": ("deep", "shallow", "none"),
        "prompts": (3, 1),
        "entry": (0, 2),
    },
    SPACE: {
        "distances": (3, 2),
        "tuning": ("lora", "full"),  # what is tuned, and how, decodes as a base of its own
        "alpha": (2.0,),
    },
    HiddenTransfer: {
        "layers": ((0, 1, 2), (1, 1, 2), (2, 2, 2), (0, 2, 2), (0, 2), (1,)),  # which say the distances, too
        "masked": (False, True),
    },
    Medusa: {
        "heads": (3, 2),
        "blocks": (1, 2),
        "lm_head": ("full", "tied", "low_rank"),
    },
    Hydra: {
        "heads": (3, 2),
        "blocks": (1, 2),
        "lm_head": ("full", "tied", "low_rank"),
        "prefix_attention": (True, False),
    },
    Amphista: {
        "heads": (3, 2),
        "blocks": (1, 2),
        "lm_head": ("full", "tied", "low_rank"),
        "adaptation_layers": (2, 1, 0),
        "sampled_token": (True, False),
        "position_encoding": (True, False),
        "self_attention_layers": (1, 2, 0),
    },
    DFlash: {
        "block": (4, 3),  # as many distances, or one less
        "layers": (2, 1),
        "tapped": ((), (3,), (0, 2)),
        "taps_count": (3, 1),
        "sample_from_anchor": (False, True),
        "from_newest": (True, False),
        "head_norms": (False, True),
        "markov_rank": (4, 0),
    },
    Eagle: {
        "depth": (3, 2),
        "reads": ((), (1, 3)),
        "even": (False, True),
        "own_head": (False, True),
    },
    PromptLookup: {
        "length": (16, 2),
        "longest": (8, 1),
    },
    Suffix: {
        "length": (16, 3),
        "longest": (8, 2),
        "occurrences": (4, 1),
        "fading": (0.8, 1.0),
    },
    Rest: {
        "size": (300, 40),
        "length": (16, 3),
        "longest": (16, 3),
        "continuations": (16, 2),
    },
    TokenRecycling: {
        "successors": (8, 2),
        "length": (6, 3),
    },
}
OF_TRAINING = {"initial", "objective", "direction", "decay", "alignment", "labels", "weighting", "p_ar", "training"}
OF_TRAINING |= {"train_visibility", "dropout", "unroll", "start", "features"}
OF_SHAPES = {"rank", "targets", "vocabulary"}  # of what a loaded adapter holds


def each_value(options):
    """The fewest combinations in which every value of every option occurs, the first of them all defaults."""
    count = max(map(len, options.values()))
    return [{name: values[i % len(values)] for name, values in options.items()} for i in range(count)]


def pairwise(options):
    """Few combinations, the first of them all defaults, such that every two values of two options meet."""
    names = list(options)
    combinations = list(itertools.product(*options.values()))

    def pairs(c):
        return {(i, c[i], j, c[j]) for i, j in itertools.combinations(range(len(c)), 2)}

    missing, chosen = set().union(*map(pairs, combinations)), []
    while missing:
        best = max(combinations, key=lambda c: len(pairs(c) & missing)) if chosen else combinations[0]
        chosen.append(dict(zip(names, best, strict=True)))
        missing -= pairs(best)
    return chosen


def settings_of(method):
    """A name for a test."""
    return method.name + "".join(f"-{value}" for value in dataclasses.astuple(method))


def variants(combine):
    """Methods with how tokens are drawn, which is one more option."""
    for method, options in OPTIONS.items():
        for settings in combine({"sampling": (GREEDY, SAMPLING[1])} | options):
            sampling = settings.pop("sampling")
            settings |= {"distances": len(settings["layers"])} if method is HiddenTransfer else {}
            yield method(**settings), sampling


EVERY_VALUE = list(variants(each_value))
EVERY_PAIR = [variant for variant in variants(pairwise) if variant not in EVERY_VALUE]
# Of every method one greedy and one sampled variant are fast; not its defaults where it has others, which decode below.
FAST = [v for method in OPTIONS for v in [v for v in EVERY_VALUE if isinstance(v[0], method)][:3][-2:]]
REST = [variant for variant in EVERY_VALUE + EVERY_PAIR if variant not in FAST]
DEFAULTS = [method(**{name: values[0] for name, values in options.items()}) for method, options in OPTIONS.items()]


def drafter(method, model, paths=WIDE, probes=None):
    """A drafter with one tree of those paths that the method reaches."""
    paths = [path for path in paths if len(path) <= method.max_distance]
    tree = stack_trees([build_tree(paths, method.probe_distances, probes)])
    return untrained_drafter(method, model, tree)


def check(draft, prompts, sampling, seed, batch_size, limit=24):
    """The text of autoregressive decoding, of the base that the method has tuned where it has."""
    settings = {"sampling": sampling, "seed": seed}
    plain = generate(autoregressive(draft.model), prompts, limit, **settings)
    ours = generate(draft, prompts, limit, batch_size=batch_size, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    return ours


def taken(answers):
    """Drafts accepted and offered in all answers, by distance."""
    return (np.sum([getattr(answer, name) for answer in answers], axis=0) for name in ("accepted", "offered"))


def test_every_method_and_setting_is_covered():
    drawn = {(method.name, sampling.temperature > 0) for method, sampling in FAST}
    assert drawn == set(itertools.product((method.name for method in DEFAULTS), (False, True)))
    assert {method.name for method, _ in EVERY_VALUE} | {"autoregressive"} == set(METHODS)
    for method, options in OPTIONS.items():
        of_decoding = {field.name for field in dataclasses.fields(method)} - OF_TRAINING - OF_SHAPES
        assert of_decoding <= options.keys() | {"distances"}


@pytest.mark.parametrize(("sampling", "few_rows"), [(GREEDY, 1), (SAMPLING[0], 100)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("method", DEFAULTS, ids=lambda m: m.name)
def test_same_tokens_as_autoregressive(tiny, method, sampling, few_rows, monkeypatch):
    """One prompt at a time; the options below are tested with several.

    Kernels are in blocks for one row alone, so that the two sides multiply in different orders, or for all rows.
    """
    monkeypatch.setattr(jaxspec.weights.load, "FEW_ROWS", few_rows)
    draft = drafter(method, tiny, NARROW if sampling.temperature else WIDE)
    answers = check(draft, make_prompts(12), sampling, 3, 1)
    accepted, offered = taken(answers)
    assert accepted[0] > 0 and (accepted[1] > 0 or not method.trainable)  # taken
    assert sum(accepted) < sum(offered)  # and refused
    assert any(a.tokens[-1] in tiny.eos for a in answers)  # the limit has tests of its own below
    assert any(0 in a.tokens for a in answers)  # token 0 is an ordinary token


def named(variants, *marks):
    return [pytest.param(*v, id=f"{settings_of(v[0])}-{v[1].temperature:g}", marks=marks) for v in variants]


@pytest.mark.parametrize("method, sampling", named(FAST) + named(REST, pytest.mark.slow))
def test_every_option_is_lossless(tiny, method, sampling):
    """In the slow tests every value of every option and every two of two; each with four states of unequal probes."""
    depth = method.max_distance
    states = [
        State(tuple(p for p in WIDE if len(p) <= needs), (depth, *[n % (depth + 1) for n in range(count)]), needs)
        for needs, count in ((0, 0), (1, 6), (2, 18), (3, 23))
        if needs <= depth
    ]
    model = dataclasses.replace(tiny, eos=(5, 9))
    draft = untrained_drafter(method, model, make_plan(states))
    answers = check(draft, make_prompts(8), sampling, 3, 4)
    assert any(sum(a.accepted) for a in answers) and any(a.tokens[-1] in model.eos for a in answers)
    assert not sampling.temperature or any(0 in a.tokens for a in answers)  # greedy texts of eight prompts are without


@pytest.mark.parametrize(
    ("prompting", "plan", "sampling"),
    [
        pytest.param("deep", efficient([3, 3, 3]), GREEDY, id="efficient"),
        pytest.param("shallow", efficient([4, 2, 1]), SAMPLING[1], id="thinning", marks=pytest.mark.slow),
        pytest.param("none", cartesian([2, 2, 2]), GREEDY, id="full", marks=pytest.mark.slow),
        pytest.param("deep", cartesian([2, 2, 2]), SAMPLING[1], id="full-sampling", marks=pytest.mark.slow),
    ],
)
def test_bitas_trees_decode_what_the_base_would(tiny, prompting, plan, sampling):
    """Section 3.2 and Table 4: efficient trees, constant or thinning, and full ones, with masks on every node."""
    draft = untrained_drafter(BiTA(prompts=3, prompting=prompting), tiny, plan)
    answers = check(draft, make_prompts(12), sampling, 3, 4)
    accepted, offered = taken(answers)
    assert accepted[0] > 0 and sum(accepted) < sum(offered)
    assert any(a.tokens[-1] in tiny.eos for a in answers) and any(0 in a.tokens for a in answers)


STRAIGHT = [(method, GREEDY) for method in DEFAULTS if method.probe_distances]
STRAIGHT += [(PPD(ensemble=2, aggregation="learned"), SAMPLING[0])]


@pytest.mark.parametrize("method, sampling", named(STRAIGHT[-1:]) + named(STRAIGHT[:-1], pytest.mark.slow))
def test_straightforward_decoding(tiny, method, sampling):
    """BiTA 3.2: only the root carries probes, and what is left of them drafts again."""
    draft = untrained_drafter(method, tiny, straightforward(3))
    answers = check(draft, make_prompts(8), sampling, 3, 4)
    assert sum(sum(a.accepted) for a in answers) > 0 and any(a.tokens[-1] in tiny.eos for a in answers)
    assert sum(a.offered[-1] for a in answers) < sum(a.steps for a in answers)  # drafts are shorter after acceptances


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_random_topologies(tiny, seed):
    """Any tree is lossless, whatever it offers and wherever its probes sit."""
    rng = np.random.default_rng(seed)
    plan = sparse_tree(rng.dirichlet(np.ones(9), size=3)[:, :6], int(rng.integers(2, 20)))
    paths = plan.states[0].paths
    probes = rng.integers(0, 4, len(paths) + 1).tolist()
    check(drafter(PPD(), tiny, paths, probes), make_prompts(4, seed=seed), SAMPLING[0], seed, 4)


def random_plan(rng, method):
    """Trees at random for 0 to M probes, with as many probes as chance will have on every node."""
    M, states = method.probe_distances, []
    for needs in range(M + 1):
        paths = [path for path in random_tree(M, 4, 9, int(rng.integers(1e6))).states[0].paths if len(path) <= needs]
        states.append(State(tuple(paths), tuple(rng.integers(0, M + 1, len(paths) + 1).tolist()), needs))
    return make_plan(states)


def test_dynamic_trees_of_one_padded_size_share_a_program(tiny):
    """Random states and random ways between them: the same text, and nothing compiled after the first tree."""
    rng, method, prompts = np.random.default_rng(0), PPD(ensemble=2), make_prompts(4)
    trainable = method.init(jax.random.key(1), Base(tiny.params, tiny.decoder))
    plain = generate(autoregressive(tiny), prompts, 24, sampling=SAMPLING[0])
    visited = set()
    for trial in range(8):
        plan = random_plan(rng, method)
        padded = [pad_tree(state, 12, 40, 3, 4) for state in unstack(plan.arrays(3))]
        draft = untrained_drafter(method, tiny, stack_trees(padded), trainable)
        ours = generate(draft, prompts, 24, sampling=SAMPLING[0])
        assert [a.tokens for a in ours] == [a.tokens for a in plain]
        assert trial == 0 or all(a.compile_seconds == 0 for a in ours)
        visited |= {accepted for a in ours for accepted in np.flatnonzero(a.accepted)}
    assert visited >= {0, 1}  # candidates were taken, at more than one depth


def unstack(tree):
    """The trees of several states, one by one."""
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(len(tree.parent))]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sliding_window": 6}, id="window", marks=pytest.mark.slow),
        pytest.param(
            {"sliding_window": 6, "first_window_layer": 1, "qkv_bias": True, "tie_embeddings": True}
            | {"rope_scaling": RopeScaling("dynamic", 4.0, 16)},
            id="late-window-bias-tied-dynamic-rope",
        ),
        pytest.param({"rope_scaling": RopeScaling("llama3", 8.0, 16)}, id="llama3-rope", marks=pytest.mark.slow),
    ],
)
def test_every_familys_masks_and_frequencies_decode_what_the_base_would(changes):
    """Masks and frequencies of every family depend on a row's own position alone."""
    model = make_tiny(dataclasses.replace(TINY, **changes))
    check(drafter(PPD(), model), make_prompts(4), GREEDY, 0, 4, limit=40)


def test_end_of_text_inside_a_draft(tiny):
    """Generation stops exactly at the first end-of-text token, even in the middle of an accepted path."""
    perfect = 0
    for eos in (0, 5, 10):
        model = dataclasses.replace(tiny, eos=(eos, (eos + 7) % 16))
        for answer in check(drafter(PPD(), model), make_prompts(6), GREEDY, 0, 3, limit=40):
            assert not {*model.eos} & {*answer.tokens[:-1]}
            perfect += answer.tokens[-1] in model.eos and answer.drafted[-1]
    assert perfect > 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_length_limit_is_exact(tiny, limit):
    model = dataclasses.replace(tiny, eos=())
    for answer in check(drafter(PPD(), model), make_prompts(6), GREEDY, 0, 3, limit=limit):
        assert answer.new_tokens == limit


def test_context_filled_to_the_last_position(tiny):
    """Prompt and answer may fill the whole context: drafts reach beyond it, the answer does not change."""
    model = dataclasses.replace(tiny, eos=())
    length = model.config.max_positions
    prompts = [(make_prompts(1, seed=s)[0] * 200)[: length - 30] for s in range(2)]
    assert all(a.new_tokens == 30 for a in check(drafter(PPD(), model), prompts, GREEDY, 0, 2, limit=30))


def test_text_depends_on_the_seed_alone(tiny):
    """Not on the batch a prompt is in, nor on its place there; another seed gives another text."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(5)
    draft = drafter(PPD(), model)

    def run(prompts, seed):
        answers = generate(draft, prompts, 20, sampling=SAMPLING[0], seed=seed, batch_size=5)
        return [answer.tokens for answer in answers]

    assert run(prompts, 1) == run(prompts[::-1], 1)[::-1]
    assert run(prompts, 1) != run(prompts, 2)

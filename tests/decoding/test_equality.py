"""Lossless: every method emits, token for token, what autoregressive decoding of its base emits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec.drafters.defaults
import jaxspec.weights.layouts
from jaxspec.config import RopeScaling, SamplingConfig
from jaxspec.drafters import METHODS
from jaxspec.drafters.costs import RowCosts
from jaxspec.drafters.defaults import cost_name, with_default
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
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
from jaxspec.trees import (
    State,
    cartesian,
    efficient,
    from_paths,
    make_plan,
    random_tree,
    sparse_tree,
    straightforward,
)
from jaxspec.trees.arrays import pad_tree, stack_trees
from tests.helpers.methods import settings as settings_of
from tests.helpers.methods import union, untrained_drafter
from tests.helpers.model import plain
from tests.helpers.tiny import TINY, make_prompts, make_tiny

GREEDY = SamplingConfig()
SAMPLING = SamplingConfig(1.5, top_k=5)  # in the fast tests, for all filters take long to compile
FILTERED = SamplingConfig(1.5, top_k=5, top_p=0.9, min_p=0.02)
SHAPES = dataclasses.replace(
    TINY, num_heads=2, num_kv_heads=1, head_dim=6, rope_theta=500.0
)  # of a method's own layers
WIDE = [(a,) for a in range(6)] + [(a, b) for a in range(3) for b in range(4)] + [(0, 0, c) for c in range(5)]

# Every option of every method that decoding can tell apart. A new method or setting without an entry here, or among
# those of training, fails test_every_method_and_setting_is_covered.
OPTIONS = {
    PPD: {
        "distances": (3, 2),
        "ensemble": (1, 3),
        "mask": ("ensemble", "decoder", "encoder", "causal", "alone"),
        "aggregation": ("average", "learned"),
        "prefix_tokens": (0, 2),
        "head": ("none", "one_stage"),  # one trained in two stages decodes likewise
        "multi_exit": (1, 2),
        "exit_norm": (True, False),
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
        "prefix_norm": (True, False),  # of the layer that prefix_attention adds
        "even": (True, False),
        "bias": (False, True),
    },
    Amphista: {
        "heads": (3, 2),
        "blocks": (1, 2),
        "lm_head": ("full", "tied", "low_rank"),
        "adaptation_layers": (2, 1, 0),
        "sampled_token": (True, False),
        "position_encoding": (True, False),
        "self_attention_layers": (1, 2, 0),
        "even": (True, False),
    },
    DFlash: {
        "block": (4, 3),  # as many distances, or one less
        "layers": (2, 1),
        "tapped": ((), (3,), (0, 2)),
        "taps_count": (3, 1),
        "sample_from_anchor": (False, True),
        "from_newest": (True, False),
        "even": (True, False),
        "mask_token": (-1, 15),
        "shapes": (None, dataclasses.replace(SHAPES, head_norms=True)),
        "head_norms": (False, True),
        "markov_rank": (4, 0),
        "markov_tables": (False, False, True),
        "convolution": (0, 2),
        "convolution_group": (16, 8),
        "selector_rank": (0, 4, 4),
        "selector_width": (16, 3),
        "confidence_head": ("none", "state", "markov"),  # which counts where drafts are chosen per step
    },
    DraftModel: {
        "layers": ((0, 1, 2), (0, 2)),
        "length": (3, 2),
        "shapes": (None, dataclasses.replace(TINY, num_layers=1)),
        "confidence": (0.3,),  # which, like the beam, counts where drafts are chosen per step
        "beam": (1,),
    },
    Eagle: {
        "depth": (3, 2),
        "reads": ((), (1, 3)),
        "direct": (False, True),
        "even": (False, True),
        "own_head": (False, True),
        "own_embedding": (False, True),
        "shapes": (None, SHAPES),
        "norm_before_residual": (False, True),
        "fc_norm": (False, True),
        "norm_before_fc": (False, False, True),  # not beside fc_norm
        "norm_output": (False, True),
        "confidence": (0.0,),  # which counts where drafts are chosen per step
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
    Lookahead: {
        "window": (3, 1, 5),
        "ngram": (4, 2, 3),
        "guesses": (3, 1, 4),
    },
    Jacobi: {
        "length": (3, 5),
    },
    Mtp: {
        "depth": (3, 1),
        "after_norm": (False, True),
        "confidence": (0.0, 0.5),
    },
    SelfSpeculative: {
        "skip_attention": ((1,), (), (0, 1, 2)),
        "skip_mlp": ((0,), (0, 1, 2), ()),
        "length": (3, 5, 1),
        "threshold": (0.1, 0.5),
        "acceptance": (0.9, 0.2),
    },
}
OF_TRAINING = {"initial", "objective", "direction", "decay", "alignment", "labels", "weighting", "p_ar", "training"}
OF_TRAINING |= {"train_visibility", "dropout", "unroll", "start", "features", "top_k"}
EXCLUSIVE = (
    {("fc_norm", True), ("norm_before_fc", True)},
    {("prefix_attention", False), ("prefix_norm", True)},
)
WAYS = 4  # greedy or sampled, one prompt or several at a time
OF_SHAPES = {"rank", "targets", "vocabulary"}  # of what a loaded adapter holds


def each_value(options):
    """Few combinations in which every value of every option occurs, the first of them all defaults."""
    count = max(WAYS, *map(len, options.values()))
    return [{name: values[i % len(values)] for name, values in options.items()} for i in range(count)]


def pairwise(options):
    """Few combinations, the first of them all defaults, such that every two values of two options meet."""
    combinations = itertools.product(
        *([(name, value) for value in dict.fromkeys(values)] for name, values in options.items())
    )
    combinations = [each for each in combinations if not any({*each} >= pair for pair in EXCLUSIVE)]
    pairs = {combination: {*itertools.combinations(combination, 2)} for combination in combinations}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda c: len(pairs[c] & missing)) if chosen else next(iter(pairs))
        chosen.append(dict(best))
        missing -= pairs[best]
    return chosen


def variants(combine, options_of=OPTIONS):
    """Methods with how tokens are drawn, and how many prompts at a time: two more options."""
    for method, options in options_of.items():
        for settings in combine({"sampling": (GREEDY, SAMPLING), "batch_size": (1, 4, 4, 1)} | options):
            sampling, batch_size = settings.pop("sampling"), settings.pop("batch_size")
            settings |= {"distances": len(settings["layers"])} if method is HiddenTransfer else {}
            settings |= {"start": "random"} if method in (Eagle, DFlash) and settings["shapes"] else {}
            yield method(**settings), sampling, batch_size


EVERY_VALUE = list(variants(each_value))
# The options of these do not touch each other, or hardly: every value is tried, not every two of two options. Their
# defaults meet every way to draw and every number of prompts.
APART = (
    DFlash,
    DraftModel,
    HiddenTransfer,
    Lookahead,
    Medusa,
    PromptLookup,
    Rest,
    SelfSpeculative,
    Suffix,
    TokenRecycling,
)
MEETING = {m: {name: values[:1] for name, values in o.items()} if m in APART else o for m, o in OPTIONS.items()}
EVERY_PAIR = [variant for variant in variants(pairwise, MEETING) if variant not in EVERY_VALUE]
# Of every method one variant is fast: not its defaults, sampled and batched. Of PPD its defaults are, too, greedily.
FAST = [v for method in OPTIONS for v in [v for v in EVERY_VALUE if isinstance(v[0], method)][method is not PPD : 2]]
DEFAULTS = [method(**{name: values[0] for name, values in options.items()}) for method, options in OPTIONS.items()]


def filtered(variants):
    """With all filters where tokens are sampled."""
    return [(m, FILTERED if sampling is SAMPLING else sampling, count) for m, sampling, count in variants]


SLOW = filtered(v for v in EVERY_VALUE if v not in FAST)
EXHAUSTIVE = filtered(EVERY_PAIR)


def in_states(method, model):
    """A drafter with a tree for each number of probes that the method may find, which are unequal among the nodes."""
    depth = method.facts(TINY).distances
    states = [
        State(tuple(p for p in WIDE if len(p) <= needs), (depth, *[n % (depth + 1) for n in range(count)]), needs)
        for needs, count in ((0, 0), (1, 6), (2, 18), (3, 23))
        if needs <= depth
    ]
    return untrained_drafter(method, model, make_plan(states))


def check(draft, prompts, sampling, seed, batch_size, limit=24):
    """The text of autoregressive decoding, of the base that the method has tuned where it has."""
    settings = {"sampling": sampling, "seed": seed}
    plain = generate(autoregressive(draft.model), prompts, limit, **settings)
    ours = generate(draft, prompts, limit, batch_size=batch_size, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    return ours


def taken(answers):
    """Drafts accepted and offered in all answers, by distance."""
    return [np.sum([getattr(answer, name) for answer in answers], axis=0) for name in ("accepted", "offered")]


def test_every_method_and_setting_is_covered():
    """Every method is drawn greedily and sampled, for prompts alone and batched; one of the four is fast."""
    everything = [(m.name, sampling.temperature > 0, count) for m, sampling, count in FAST + SLOW]
    assert {*everything[: len(FAST)]} == {("ppd", False, 1), *((m.name, True, 4) for m in DEFAULTS)}
    assert {*everything} == set(itertools.product((m.name for m in DEFAULTS), (False, True), (1, 4)))
    assert {method.name for method in DEFAULTS} | {"autoregressive"} == set(METHODS)
    for method, options in OPTIONS.items():
        of_decoding = {field.name for field in dataclasses.fields(method)} - OF_TRAINING - OF_SHAPES
        assert of_decoding <= options.keys() | {"distances"}


def named(variants, *marks):
    return [
        pytest.param(m, s, n, id=f"{settings_of(m)}-{s.temperature:g}-batch_{n}", marks=marks) for m, s, n in variants
    ]


@pytest.mark.parametrize(
    "method, sampling, batch_size",
    [*named(FAST), *named(SLOW, pytest.mark.slow), *named(EXHAUSTIVE, pytest.mark.slow, pytest.mark.exhaustive)],
)
def test_same_tokens_as_autoregressive(tiny, method, sampling, batch_size, monkeypatch):
    """Every value of every option, and in the exhaustive tests every two of two; with four states of unequal probes.

    Kernels are in blocks for one row alone, so that the two sides multiply in different orders, or for all rows.
    """
    monkeypatch.setattr(jaxspec.weights.layouts, "FEW_ROWS", 1 if batch_size == 1 else 400)
    model = dataclasses.replace(tiny, eos=(-1, 5))  # the first never comes
    answers = check(in_states(method, model), make_prompts(12), sampling, 3, batch_size)
    accepted, offered = taken(answers)
    assert accepted[0] > 0 and sum(accepted) < sum(offered)  # taken and refused
    assert any(a.tokens[-1] == 5 for a in answers)  # the limit has a test of its own below
    assert any(0 in a.tokens for a in answers)  # token 0 is an ordinary token


@pytest.mark.slow
@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.name)
def test_the_default_writes_what_the_base_would(tiny, method, monkeypatch):
    """Rows chosen in every step, down to none."""
    monkeypatch.setattr(jaxspec.drafters.defaults, "_MOST", 4)  # the compiler takes longer for more
    model = dataclasses.replace(tiny, eos=(-1, 5))
    drafter = union([method], model, 16)
    costs = RowCosts((1.0, 8.0), ((1.0, 1.001),) * 2, {cost_name(drafter): (1e-4, 1e-4)})
    answers = check(with_default(drafter, costs=costs), make_prompts(4), SAMPLING, 3, 2)
    assert sum(taken(answers)[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompting", "plan", "sampling"),
    [
        pytest.param("deep", efficient([4, 2, 1]), GREEDY, id="thinning"),
        pytest.param("shallow", cartesian([2, 2, 2]), FILTERED, id="full"),
    ],
)
def test_bitas_trees_decode_what_the_base_would(tiny, prompting, plan, sampling):
    """Section 3.2 and Table 4: efficient and full trees, with masks on every node."""
    draft = untrained_drafter(BiTA(prompts=3, prompting=prompting), tiny, plan)
    accepted, offered = taken(check(draft, make_prompts(12), sampling, 3, 4))
    assert accepted[0] > 0 and sum(accepted) < sum(offered)


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in DEFAULTS if method.facts(TINY).probes], ids=lambda m: m.name)
def test_straightforward_decoding(tiny, method):
    """BiTA 3.2: only the root carries probes, and what is left of them drafts again."""
    answers = check(untrained_drafter(method, tiny, straightforward(3)), make_prompts(16), GREEDY, 3, 4)
    assert_shorter_after_acceptances(answers)


def assert_shorter_after_acceptances(answers):
    """Drafts reach the last depth now and then, but not after an acceptance."""
    assert sum(sum(a.accepted) for a in answers) > 0
    assert 0 < sum(a.offered[-1] for a in answers) < sum(a.steps for a in answers)


def random_plan(rng, method):
    """Trees at random for 0 to M probes, with as many probes as chance will have on every node."""
    M, states = method.facts(TINY).probes, []
    for needs in range(M + 1):
        paths = [path for path in random_tree(M, 4, 9, int(rng.integers(1e6))).states[0].paths if len(path) <= needs]
        states.append(State(tuple(paths), tuple(rng.integers(0, M + 1, len(paths) + 1).tolist()), needs))
    return make_plan(states)


@pytest.mark.parametrize("drafted", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["drafted", "plain"])
def test_exact_with_weights_of_16_bits(tiny, drafted):
    """As with the same weights in float32, logits, texts and caches."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny.params)
    exact = dataclasses.replace(tiny, params=rounded, exact=True)
    wide = dataclasses.replace(tiny, params=jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    tokens = jnp.array([[3, 0, 15, 7, 7]])
    np.testing.assert_allclose(plain(exact.base, tokens), plain(wide.base, tokens), rtol=1e-5, atol=1e-4)
    prompts = make_prompts(4)
    texts = [answer.tokens for answer in generate(autoregressive(wide), prompts, 24)]
    tree = sparse_tree([[0.5, 0.3]] * 3, 5)
    drafter = untrained_drafter(PPD(), exact, tree) if drafted else autoregressive(exact)
    assert drafter.model.precision == "exact"
    assert [answer.tokens for answer in generate(drafter, prompts, 24, batch_size=4)] == texts


@pytest.mark.slow
def test_trees_of_all_kinds_share_a_program(tiny):
    """Random states and ways between them, and the papers' trees: the same text, and nothing compiled after the first.

    Any tree is lossless, whatever it offers and wherever its probes sit.
    """
    rng, method, prompts = np.random.default_rng(0), PPD(ensemble=2), make_prompts(4)
    trainable = method.init(jax.random.key(1), tiny.base)
    plans = [random_plan(rng, method) for _ in range(5)] + [efficient([3, 3, 3]), cartesian([2, 2, 2])]
    visited = set()
    for trial, plan in enumerate([*plans, straightforward(3)]):
        padded = [pad_tree(state, 15, 45, 3, 4) for state in unstack(plan.arrays(3))]
        draft = untrained_drafter(method, tiny, stack_trees((padded * 4)[:4]), trainable)
        answers = check(draft, prompts, FILTERED, 0, 4)
        assert trial == 0 or all(a.compile_seconds == 0 for a in answers)
        visited |= {accepted for a in answers for accepted in np.flatnonzero(a.accepted)}
    assert visited >= {0, 1}  # candidates were taken, at more than one depth
    assert_shorter_after_acceptances(answers)


def unstack(tree):
    """The trees of several states, one by one."""
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(len(tree.parent))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"sliding_window": 6, "rope_scaling": RopeScaling("llama3", 8.0, 16)},
            id="window-llama3-rope",
        ),
        pytest.param(
            {"sliding_window": 6, "first_window_layer": 1, "qkv_bias": True, "tie_embeddings": True}
            | {"head_norms": True, "rope_scaling": RopeScaling("dynamic", 4.0, 16)},
            id="late-window-bias-tied-head-norms-dynamic-rope",
        ),
    ],
)
def test_every_familys_masks_and_frequencies_decode_what_the_base_would(changes):
    """They depend on a row's own position alone, and drafts may reach beyond the last one of the context."""
    model = make_tiny(dataclasses.replace(TINY, num_layers=2, max_positions=64, **changes), eos=())
    plan = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    prompts = [*make_prompts(3), range(16), [*range(16), *range(8)]]
    answers = check(untrained_drafter(PPD(), model, plan), prompts, GREEDY, 0, 4, limit=40)
    accepted, _ = taken(answers)
    assert sum(accepted) > 0 and all(a.new_tokens == 40 for a in answers)


def test_texts_end_exactly_at_the_end_of_text_or_at_the_limit(tiny):
    """Even in the middle of an accepted path, which happens at both."""
    perfect = 0
    never = (-1, -1)
    for eos, limit in (((0, 7), 40), ((5, 12), 40), ((10, 1), 40), (never, 1), (never, 2), (never, 3), (never, 5)):
        model = dataclasses.replace(tiny, eos=eos)
        for answer in check(in_states(PPD(), model), make_prompts(6), GREEDY, 0, 1, limit=limit):
            assert not {*eos} & {*answer.tokens[:-1]}
            ended = answer.tokens[-1] in eos
            assert ended or answer.new_tokens == limit
            perfect += ended and answer.drafted[-1]
    assert perfect > 0

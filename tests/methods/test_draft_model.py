"""A draft model: what it reads, what it drafts, what it is made of, and which ones are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import MeshConfig, RopeScaling, SamplingConfig
from jaxspec.decoding.acceptance import Rejection
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import abstract_trainable
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.draft_source import draft_source
from jaxspec.drafters.draft_steps import with_steps
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, DraftModel
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.weights.load import save_model
from tests.helpers.decoding import begin
from tests.helpers.marks import EXHAUSTIVE
from tests.helpers.methods import batch_of, predict, sequence, trained
from tests.helpers.model import plain
from tests.helpers.tiny import TINY, make_prompts, make_text_model, make_tiny, on_mesh, with_fewer_tokens

GREEDY, SAMPLING = SamplingConfig(), SamplingConfig(1.0, top_k=12)
FIGURES = ("steps", "draft_passes", "offered")


@pytest.fixture(scope="module")
def endless(tiny):
    """Nothing ends its texts."""
    return dataclasses.replace(tiny, eos=())


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=EXHAUSTIVE), SAMPLING], ids=["greedy", "sampling"])
def test_a_draft_model_equal_to_the_base_is_always_right(endless, sampling):
    """Every step takes the whole chain and the bonus: 24 tokens after the first one in 24 / (n + 1) steps."""
    drafter = load_drafter("draft_model", endless, draft_model=endless, tree="chain:3")
    expected = generate(autoregressive(endless), make_prompts(4), 25, sampling=sampling)
    answers = generate(drafter, make_prompts(4), 25, sampling=sampling, batch_size=4)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [(a.steps, a.tokens_per_step, a.draft_passes) for a in answers] == [(6, 4.0, 6 * 3)] * 4


@pytest.mark.slow
def test_one_that_says_the_opposite_is_never_right(endless):
    opposite = endless.params | {"lm_head": -endless.params["lm_head"]}
    draft = dataclasses.replace(endless, params=opposite, fingerprint="other")
    drafter = load_drafter("draft_model", endless, draft_model=draft, tree="chain:3")
    for answer in generate(drafter, make_prompts(4), 25, batch_size=4):
        assert answer.tokens_per_step == 1 and not any(answer.accepted) and answer.offered[0] == answer.steps


@pytest.mark.slow
def test_confidence_decides_how_far_it_drafts(endless):
    """In some steps it reads its own candidates; in others it only reads the text, which gives the first distance."""
    drafter = load_drafter("draft_model", endless, draft_model=endless, tree="best:4")
    [source] = drafter.sources
    source = dataclasses.replace(source, method=dataclasses.replace(source.method, beam=2))
    answers = generate(dataclasses.replace(drafter, sources=(source,)), make_prompts(4), 25, batch_size=4)
    assert [a.tokens for a in answers] == [a.tokens for a in generate(autoregressive(endless), make_prompts(4), 25)]
    steps, passes, offered = (np.sum([getattr(a, name) for a in answers], axis=0) for name in FIGURES)
    assert steps < passes < 3 * steps
    assert offered[0] > offered[1] > 0


@pytest.mark.slow
def test_where_no_draft_pays_it_hardly_drafts(endless):
    """The first draft is made before any step; steps as dear as these are not tried for a long time after it."""
    drafter = load_drafter("draft_model", endless, draft_model=endless, tree="best:1@1,4@1000")
    answers = generate(drafter, make_prompts(2), 25, batch_size=2)
    assert [a.tokens for a in answers] == [a.tokens for a in generate(autoregressive(endless), make_prompts(2), 25)]
    decoding, state = begin(drafter, make_prompts(2), 25)
    state = decode(decoding, state, 20)
    assert all(1 <= passes <= 3 for passes in state.stats.draft_passes.tolist())
    assert not state.stats.drafted.any()


@pytest.mark.slow
def test_rows_that_draft_nothing_take_no_pass(endless):
    drafter = load_drafter("draft_model", endless, draft_model=endless, tree="best:4")
    decoding, state = begin(drafter, make_prompts(2), 25)
    before = np.asarray(state.stats.draft_passes)
    state = decode(decoding.replace(drafts=np.zeros(2, bool)), state, 9)
    np.testing.assert_array_equal(state.stats.draft_passes, before)


PATHS = [(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]


def begun(endless, texts):
    """A draft model of its own shapes, and decoding with a tree, about to verify its first draft."""
    draft = make_tiny(dataclasses.replace(TINY, num_layers=2), seed=1)
    drafter = load_drafter("draft_model", endless, draft_model=draft, tree=PATHS)
    return draft.base, *begin(drafter, texts, 16, chunk=8)


def following(base, texts):
    """Logits [V] of what follows each text, by a plain pass."""
    padded = jnp.array([[*text, *[0] * 40][:40] for text in texts])
    return [logits[len(text) - 1] for logits, text in zip(plain(base, padded), texts, strict=True)]


@pytest.mark.slow
def test_it_remembers_the_text_and_nothing_else(endless):
    """After steps as after prefill: keys and values of all tokens, the newest one's state, no candidate's."""
    prompts = make_prompts(3)
    base, decoding, state = begun(endless, prompts)
    state = decode(decoding, state, 4)
    texts = [
        [*prompt, *np.asarray(state.tokens)[row, : int(state.counts[row])].tolist()]
        for row, prompt in enumerate(prompts)
    ]
    assert [len(text) for text in texts] == (state.lengths + 1).tolist()
    [memory], [anew] = state.method_states, begun(endless, [text[:-1] for text in texts])[2].method_states
    for row, (text, logits) in enumerate(zip(texts, following(base, texts), strict=True)):
        np.testing.assert_allclose(base.logits(memory["newest"][row]), logits, rtol=1e-3, atol=1e-3)
        for ours, theirs in zip(*map(jax.tree.leaves, (memory["cache"], anew["cache"])), strict=True):
            read = (row, slice(None), slice(len(text) - 1))
            np.testing.assert_allclose(ours[read], theirs[read], rtol=1e-3, atol=1e-3)


def test_candidates_are_read_behind_their_own_path(endless):
    """A tree of the most probable tokens by the draft model's own plain pass over every path."""
    prompts = make_prompts(3)
    base, _, state = begun(endless, prompts)
    tokens = np.asarray(state.draft.tokens)
    assert all(state.draft.tree.depth[0].tolist()[node] == len(path) for node, path in enumerate(PATHS, 1))
    for row, prompt in enumerate(prompts):
        text = {(): [*prompt, int(tokens[row, 0])]}
        for node, path in enumerate(PATHS, 1):
            text[path] = [*text[path[:-1]], int(tokens[row, node])]
        for node, (path, logits) in enumerate(
            zip(PATHS, following(base, [text[p[:-1]] for p in PATHS]), strict=True), 1
        ):
            assert tokens[row, node] == np.argsort(-np.asarray(logits))[path[-1]]


@pytest.mark.slow
def test_few_tokens_have_a_part_of_its_own_projection(tiny):
    shapes, frequent = dataclasses.replace(TINY, num_layers=1), np.arange(16, dtype=np.int32)
    method = DraftModel(length=3, shapes=shapes)
    adapter = Adapter(method, trained(method, tiny.base), tiny.fingerprint, {}, frequent)
    drafter = make_drafter(adapter, dataclasses.replace(tiny, eos=()), [(0,), (1,), (0, 0)], 6)
    answers = generate(drafter, make_prompts(4), 25, batch_size=4)
    expected = generate(autoregressive(drafter.model), make_prompts(4), 25)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    drafted = {token for a in answers for token, ours in zip(a.tokens, a.drafted, strict=True) if ours}
    assert drafted and max(drafted) < 6


@pytest.mark.slow
def test_both_models_on_one_mesh():
    config = dataclasses.replace(TINY, num_kv_heads=4)
    model, draft, prompts = (
        make_tiny(config, seed=1),
        make_tiny(dataclasses.replace(config, num_layers=2)),
        make_prompts(4),
    )
    expected = generate(autoregressive(model), prompts, 16)
    many = on_mesh(model, MeshConfig(2, 2, 2))
    drafter = load_drafter("draft_model", many, draft_model=on_mesh(draft, MeshConfig(2, 2, 2)), tree="chain:3")
    assert [a.tokens for a in generate(drafter, prompts, 16, batch_size=4)] == [a.tokens for a in expected]
    _, state = begin(drafter, prompts, 8)
    [memory] = state.method_states
    keys = memory["cache"].keys[0]
    assert keys.sharding.shard_shape(keys.shape)[:2] == (1, 2)


# Vocabularies that are padded to different sizes

PROMPTS = ["hello", "a longer text, to read", "x"]
PADDED = 300  # of 257 tokens


@pytest.mark.slow
def test_tokens_that_the_base_lacks_are_not_drafted():
    """The draft model is the base with more tokens, and is always right."""
    draft = make_text_model(vocab_size=PADDED)
    base = with_fewer_tokens(draft, 257)
    drafter = load_drafter("draft_model", base, draft_model=draft, tree="chain:3")
    answers = generate(drafter, PROMPTS, 25, sampling=SAMPLING)
    expected = generate(autoregressive(base), PROMPTS, 25, sampling=SAMPLING)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert all(a.tokens_per_step == 4 for a in answers)


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "tied"), [("chain:3", True), pytest.param("best:5", False, marks=EXHAUSTIVE)])
def test_tokens_that_the_draft_model_lacks_are_not_drafted(tree, tied):
    """It is the base without them. Where the base writes some of them, it goes on behind them."""
    base = dataclasses.replace(make_text_model(vocab_size=PADDED, tie_embeddings=tied), eos=())
    drafter = load_drafter("draft_model", base, draft_model=with_fewer_tokens(base, 257), tree=tree)
    settings = {"sampling": SamplingConfig(2.0), "batch_size": 3}
    answers = generate(drafter, PROMPTS, 60, **settings)
    expected = generate(autoregressive(base), PROMPTS, 60, **settings)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    texts = [(token, ours) for a in answers for token, ours in zip(a.tokens, a.drafted, strict=True)]
    drafted = [token for token, ours in texts if ours]
    assert len(drafted) > 20 and max(drafted) < 257 <= max(token for token, _ in texts)


@pytest.mark.slow
def test_tokens_that_the_draft_model_lacks_are_not_drawn():
    base = dataclasses.replace(make_text_model(vocab_size=PADDED), eos=())
    drafter = load_drafter("draft_model", base, draft_model=with_fewer_tokens(base, 257), tree="chain:3")
    answers = generate(drafter, PROMPTS, 40, sampling=SamplingConfig(2.0), acceptance=Rejection(), batch_size=3)
    drafted = [token for a in answers for token, ours in zip(a.tokens, a.drafted, strict=True) if ours]
    assert len(drafted) > 10 and max(drafted) < 257


def test_another_token_that_both_have_is_refused_whatever_their_sizes():
    model = make_text_model()
    draft = make_text_model(vocab_size=PADDED)
    assert draft_source(draft, model)
    swapped = model.tokenizer.get_vocab() | {"<end>": 280}

    class Other:
        def get_vocab(self):
            return swapped

    message = r"1 tokens differ \(256 is 'none' there and '<end>' here\); a draft model needs"
    with pytest.raises(UserError, match=message):
        draft_source(dataclasses.replace(draft, tokenizer=Other()), model)
    assert draft_source(
        dataclasses.replace(draft, tokenizer=Other()), with_fewer_tokens(model, 256)
    )  # beyond what both have


# Made of the base's layers


def test_it_begins_as_some_of_the_bases_layers(tiny):
    """Its logits at distance d are those of these layers behind the d tokens before, and its embeddings the base's."""
    method, tokens = DraftModel(layers=(0, 2), length=3), sequence(tiny, 12)
    trainable = method.init(jax.random.key(0), tiny.base)
    assert trainable.keys() == {"layers_0", "layers_1", "norm"}
    kept = {"layers_0": tiny.params["layers_0"], "layers_1": tiny.params["layers_2"]}
    rest = {name: tiny.params[name] for name in ("embedding", "lm_head", "norm")}
    short = Base(kept | rest, Decoder(dataclasses.replace(TINY, num_layers=2)))
    logits = predict(method, trainable, tiny.base, batch_of(tokens, [[2, 5]]))
    expected = plain(short, tokens)[0]
    for group, point in enumerate((2, 5)):
        np.testing.assert_allclose(logits[0, group], expected[point + 1 : point + 4], rtol=1e-4, atol=1e-4)


def test_windows_stay_with_their_layers():
    """Of four layers the first two see everything; of those kept only the first does."""
    model = make_tiny(dataclasses.replace(TINY, num_layers=4, sliding_window=4, first_window_layer=2))
    assert DraftModel(layers=(0, 3)).config(model.base).first_window_layer == 1


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (0, 3)}, "layers must be among 0 to 2 of this base, got 0, 3"),
        ({"layers": (-1, 2)}, "layers must be among 0 to 2"),
        ({"layers": (2, 0)}, "layers must be different and in ascending order, got 2, 0"),
        ({"layers": ()}, "layers must be different"),
        ({"confidence": 0}, "confidence must be between 0 and 1, got 0"),
        ({"confidence": 1.0}, "confidence must be between 0 and 1, got 1.0"),
        ({"beam": 0}, "beam must be at least 1"),
        ({"alignment": 0.0}, "alignment and labels must not be negative and not both 0"),
        ({"shapes": dataclasses.replace(TINY, vocab_size=17)}, "a vocabulary of 17 tokens and the base one of 16"),
    ],
)
def test_settings_that_make_no_sense(tiny, settings, message):
    with pytest.raises(UserError, match=message):
        abstract_trainable(DraftModel(**settings), tiny.config)


def test_another_tokenizer_is_refused_with_the_tokens_that_differ():
    model, other = make_text_model(), make_text_model(1)
    swapped = other.tokenizer.get_vocab()
    a, b = (next(token for token, number in swapped.items() if number == i) for i in (5, 9))

    class Swapped:
        def get_vocab(self):
            return swapped | {a: 9, b: 5}

    draft = dataclasses.replace(other, name="draft", tokenizer=Swapped())
    with pytest.raises(UserError) as refused:
        load_drafter("draft_model", model, draft_model=draft)
    words = f"2 tokens differ (5 is {b!r} there and {a!r} here, 9 is {a!r} there and {b!r} here)"
    assert words in str(refused.value) and "draft model 'draft' has another tokenizer" in str(refused.value)


def test_another_vocabulary_is_refused(tiny):
    draft = make_tiny(dataclasses.replace(TINY, vocab_size=18))
    with pytest.raises(UserError, match="a vocabulary of 18 tokens, 'tiny' one of 16; a draft model needs"):
        draft_source(draft, tiny)


def test_draft_models_that_cannot_be(tiny, tmp_path):
    model = make_text_model()
    with pytest.raises(UserError, match="'nowhere': no such file or directory"):
        load_drafter("draft_model", model, draft_model="nowhere")
    with pytest.raises(UserError, match=r"no adapter of draft_model ships .* or name another base with --draft-model"):
        load_drafter("draft_model", model)
    with pytest.raises(UserError, match="a draft model is for the method draft_model"):
        load_drafter("prompt_lookup", model, draft_model=model)
    with pytest.raises(UserError, match="an adapter or a draft model, not both; got 'somewhere' too"):
        load_drafter("draft_model", model, "somewhere", draft_model=model)
    with pytest.raises(UserError, match="not trained and has no draft vocabulary"):
        load_drafter("draft_model", model, draft_model=model, draft_vocabulary=8)
    save_model(make_text_model(1, num_layers=1), tmp_path / "draft")
    assert not load_drafter("draft_model", model, draft_model=tmp_path / "draft", tree="own").note
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        load_drafter("draft_model", model, draft_model=tmp_path / "draft")


def test_one_no_smaller_than_the_base_is_only_warned_of(tiny):
    draft = make_tiny(dataclasses.replace(TINY, num_layers=4))
    warning = "warning: draft model 'tiny' is no smaller than the base: it will not pay"
    assert load_drafter("draft_model", tiny, draft_model=draft, tree="own").note == warning
    assert load_drafter("draft_model", tiny, draft_model=draft).note.startswith(f"{warning}; costs of rows are typical")


def test_one_that_has_learned_shorter_texts_is_warned_of(tiny):
    draft = make_tiny(dataclasses.replace(TINY, num_layers=1, max_positions=64))
    note = load_drafter("draft_model", tiny, draft_model=draft, tree="own").note
    assert note == "warning: draft model 'tiny' has learned texts of 64 tokens, and drafts badly behind that"


def test_confidence_and_beam_are_settings_of_decoding(tiny):
    draft = make_tiny(dataclasses.replace(TINY, num_layers=1))
    method = load_drafter("draft_model:confidence=0.6,beam=2", tiny, draft_model=draft).source.method
    assert (method.confidence, method.beam, method.shapes) == (0.6, 2, draft.config)
    for name, message in (("draft_model:layers=1", "no setting 'layers'"), ("draft_model:beam=0", "beam must be at")):
        with pytest.raises(UserError, match=message):
            load_drafter(name, tiny, draft_model=draft)


def test_choices_are_of_one_draft_model(tiny):
    """What `jaxspec tune` found for one says nothing of another."""
    sources = [load_drafter("draft_model", tiny, draft_model=make_tiny(seed=seed)).source for seed in (1, 2)]
    sources.append(dataclasses.replace(sources[0], weights="", adapter=Adapter(DraftModel(), {}, "base", {})))
    stepped = [with_steps(source, Adapter(PPD(), {}, "draft", {})) for source in sources]
    assert len({source.digest for source in [*sources, *stepped]}) == 6


def test_long_texts_are_those_beyond_its_own_context(tiny):
    """Whatever the base's is, or where the base has frequencies of one kind."""
    scaling = RopeScaling("longrope", 4.0, 16, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    method = DraftModel(shapes=dataclasses.replace(TINY, rope_scaling=scaling))
    base = tiny.base.for_texts(jnp.array([17, 16]))
    assert base.long is None
    np.testing.assert_array_equal(method.as_draft_model(tiny.params, base).long, [True, False])

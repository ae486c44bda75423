"""Penalties: each node is judged as if its path had been emitted, so that drafts change no text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Rejection, Typical
from jaxspec.decoding.loop import decode
from jaxspec.decoding.penalties import Penalties, Seen, tokens_of
from jaxspec.decoding.sampling import make_row_sampler
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.divergence import first_divergence
from jaxspec.generation.generate import generate
from jaxspec.methods import Suffix
from jaxspec.model.attention import causal_context
from jaxspec.trees import from_paths
from tests.decoding.test_equality import DEFAULTS, check
from tests.helpers.decoding import begin
from tests.helpers.marks import slow_ones
from tests.helpers.methods import union
from tests.helpers.tiny import TINY, make_prompts, make_tiny

GREEDY = SamplingConfig(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.2, top_k=8)
LOOPING = SamplingConfig(repetition_penalty=1.1, presence_penalty=-1.5, frequency_penalty=0.1)  # drafts are right


def penalised(logits, prompt, answer, config):
    """Token by token, as vLLM documents them."""
    logits = np.array(logits, np.float32)
    for token, count in enumerate(np.bincount(np.array(answer, int), minlength=len(logits))):
        if count or token in prompt:
            factor = config.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= config.frequency_penalty * count + config.presence_penalty * (count > 0)
    return logits


@jax.jit
def logits_of(base, tokens):
    """[1, T, V], of the plain forward pass."""
    return base.logits(base.rows(base.embed(tokens), causal_context(*tokens.shape))[0])


def written(model, prompt, count, config):
    """The greedy text, one token after the other from whole passes; and the smallest gap that decided."""
    answer, gap = [], np.inf
    while len(answer) < count and not (answer and answer[-1] in model.eos):
        text = np.zeros((1, 48), np.int32)
        text[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        logits = logits_of(model.base, text)[0, len(prompt) + len(answer) - 1]
        scores = penalised(logits, prompt, answer, config)
        answer.append(int(np.argmax(scores)))
        gap = min(gap, np.diff(np.sort(scores)[-2:])[0])
    return answer, gap


def test_the_text_is_that_of_penalties_written_down(tiny):
    prompts, changed = make_prompts(6), 0
    for prompt in prompts:
        expected, gap = written(tiny, prompt, 20, GREEDY)
        assert gap > 1e-4
        [found] = generate(autoregressive(tiny), [prompt], 20, sampling=GREEDY)
        assert found.tokens == expected
        changed += expected != generate(autoregressive(tiny), [prompt], 20)[0].tokens
    assert changed > 3


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_drafts_change_no_text(tiny, temperature):
    sampling = dataclasses.replace(LOOPING, temperature=temperature)
    answers = check(union([Suffix()], tiny, 6), make_prompts(8), sampling, 3, 4)
    assert sum(sum(a.accepted) for a in answers) > 0


OF_EACH_KIND = ("ppd", "hydra", "eagle", "suffix", "lookahead", "self_speculative")


@pytest.mark.parametrize("method", slow_ones(DEFAULTS, OF_EACH_KIND))
def test_drafts_of_no_method_change_a_text(tiny, method):
    model = dataclasses.replace(tiny, eos=(-1, 5))
    answers = check(union([method], model, 16), make_prompts(6), SAMPLED, 3, 2)
    assert sum(sum(a.offered) for a in answers) > 0


def test_a_node_counts_the_tokens_of_its_path():
    """The root, 4, is counted already; below it stand 1 with 1 and 2, and 3."""
    tree = jax.tree.map(lambda x: x[:1], from_paths([(0,), (1,), (0, 0), (0, 1)]).arrays(0))
    assert tree.parent.tolist() == [[0, 0, 0, 1, 1]]
    seen = Seen.begin(jnp.zeros((1, 5), bool)).after(jnp.array([[4, 0]]), jnp.array([[True, False]]))
    counts = seen.at_nodes(tree, jnp.array([[4, 1, 3, 1, 2]]))[0]
    assert counts.tolist() == [[0, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [0, 2, 0, 0, 1], [0, 1, 1, 0, 1]]


def test_rows_have_penalties_of_their_own():
    """A row that asks for none keeps its logits bit by bit, whatever the others ask for."""
    rng = np.random.default_rng(0)
    logits, prompts, answers = rng.normal(size=(2, 1, 9)).astype(np.float32), [[0, 1], [2]], [[1, 3, 3], [4, 4]]
    counts = np.stack([np.bincount(answer, minlength=9) for answer in answers]).astype(np.int32)
    seen = Seen(jnp.array(tokens_of(prompts, 9)), jnp.array(counts))
    found = Penalties.of([GREEDY, SamplingConfig()])(jnp.array(logits), seen, seen.counts[:, None])
    np.testing.assert_allclose(found[0, 0], penalised(logits[0, 0], prompts[0], answers[0], GREEDY), rtol=1e-6)
    np.testing.assert_array_equal(found[1], logits[1])


def test_without_penalties_the_program_has_none_of_this():
    """Nothing is counted, and the state has no room for it."""
    model = make_tiny(dataclasses.replace(TINY, vocab_size=19))  # unlike any other size
    drafter = load_drafter("suffix", model)
    texts = []
    for sampling in (SamplingConfig(), GREEDY):
        decoding, state = begin(drafter, make_prompts(2), 8, sampling)
        program = decode.lower(decoding, state, np.int32(1)).as_text()
        signature = program[: program.index("->")]
        texts.append((state.seen is None, "tensor<2x19xi32>" in signature, len(program)))
    assert [text[:2] for text in texts] == [(True, False), (False, True)] and texts[0][2] < texts[1][2]
    assert make_row_sampler([GREEDY]).penalties is None


@pytest.mark.parametrize("rule", [Rejection(), Typical()], ids=["rejection", "typical"])
def test_greedy_texts_are_the_same_by_every_rule(tiny, rule):
    prompts, drafter = make_prompts(4), union([Suffix()], tiny, 6)
    found = generate(drafter, prompts, 20, sampling=GREEDY, acceptance=rule, batch_size=4)
    plain = generate(autoregressive(tiny), prompts, 20, sampling=GREEDY)
    assert [a.tokens for a in found] == [a.tokens for a in plain]


def test_a_divergence_is_judged_with_penalties(tiny):
    prompt, reference = [1, 2, 3], [4, 4, 6]
    scores = penalised(logits_of(tiny.base, jnp.array([[*prompt, 4, 4]]))[0, -1], prompt, [4, 4], GREEDY)
    found = first_divergence(tiny, prompt, [4, 4, 0], reference, GREEDY)
    np.testing.assert_allclose(found.gap, abs(scores[0] - scores[6]), rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition-penalty must be above 0"),
        ({"presence_penalty": 2.5}, "presence-penalty must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency-penalty must be between -2 and 2"),
    ],
)
def test_bad_penalties_are_refused(tiny, settings, message):
    with pytest.raises(UserError, match=message):
        generate(autoregressive(tiny), [[1]], 2, sampling=SamplingConfig(**settings))

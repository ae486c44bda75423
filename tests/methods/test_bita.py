"""BiTA: who sees the prompts (Figure 3), and what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.method import abstract_trainable
from jaxspec.methods import BiTA
from jaxspec.model.attention import Context, causal_context
from jaxspec.model.base import Base
from tests.helpers.methods import batch_of, predict, sequence, trained
from tests.helpers.model import quick_jit, run_layers


@pytest.fixture
def base(tiny):
    return Base(tiny.params, tiny.decoder)


def test_masks_without_prompts_are_tokens_of_their_own(tiny, base):
    """Read behind the text by the plain base: embeddings at the positions of the tokens they stand for."""
    method, tokens, p = BiTA(prompting="none"), sequence(tiny), 7
    trainable = trained(method, base)

    @quick_jit
    def behind_the_text(base, masks):
        x = jnp.concatenate([base.embed(tokens[:, : p + 1]), masks[None]], axis=1)
        return base.logits(base.rows(x, causal_context(1, p + 4))[0][0, p + 1 :])

    predicted = predict(method, trainable, base, batch_of(tokens, [[p]]))
    np.testing.assert_allclose(predicted[0, 0], behind_the_text(base, trainable["masks"]), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_shallow_prompts_are_embeddings_that_run_through_the_base(tiny, base):
    """The masks see what the prompts leave in every layer, as if they stood before the text; the text does not."""
    method, tokens, p = BiTA(prompting="shallow", prompts=3), sequence(tiny), 7
    trainable = trained(method, base)
    P, r = 3, 3 + p + 1 + 3
    x = jnp.concatenate([trainable["prompts"], base.embed(tokens[0, : p + 1][None])[0], trainable["masks"]])[None]
    positions = jnp.concatenate([jnp.arange(P), jnp.arange(p + 4)])[None]
    mask = np.tri(r, dtype=bool)
    mask[P : P + p + 1, :P] = False
    hidden, _ = run_layers(base, x, Context(positions, jnp.array(mask)[None, None]))
    predicted = predict(method, trainable, base, batch_of(tokens, [[p]]))
    np.testing.assert_allclose(predicted[0, 0], base.logits(hidden)[0, -3:], rtol=1e-3, atol=1e-3)


def test_deep_prompts_are_learned_per_layer_and_key_value_head(tiny, base):
    shapes = jax.tree.map(lambda x: x.shape, abstract_trainable(BiTA(prompts=5), tiny.config))
    assert shapes == {"masks": (3, 32), "prompts": {"keys": (3, 2, 5, 8), "values": (3, 2, 5, 8)}}
    late = jax.tree.map(lambda x: x.shape, abstract_trainable(BiTA(prompts=5, entry=2), tiny.config))
    assert late["prompts"]["keys"] == (1, 2, 5, 8)
    trainable = BiTA().init(jax.random.key(0), base)
    for leaf in jax.tree.leaves(trainable):
        assert np.std(leaf) == pytest.approx(0.02, rel=0.2)


@pytest.mark.slow
def test_deep_prompts_of_shallow_content_are_shallow_prompts(tiny, base):
    """The two differ in what is trained alone."""
    shallow, tokens = BiTA(prompting="shallow", prompts=4), sequence(tiny)
    trainable = trained(shallow, base)
    one = predict(shallow, trainable, base, batch_of(tokens, [[3, 9]]))
    two = predict(BiTA(prompts=4), shallow.prepare(trainable, base), base, batch_of(tokens, [[3, 9]]))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_published_counts_of_trainable_parameters():
    """About 0.06% of a 7B base (4.2), and a tenth of that share of a 70B one."""
    from jaxspec.weights.shapes import LLAMA2_7B, LLAMA2_70B

    def count(method, shapes):
        return sum(x.size for x in jax.tree.leaves(abstract_trainable(method, shapes)))

    assert count(BiTA(), LLAMA2_7B) / 6.74e9 == pytest.approx(0.0006, abs=0.0001)
    assert count(BiTA(distances=4), LLAMA2_70B) / 69e9 < 0.00006

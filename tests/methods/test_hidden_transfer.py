"""Hidden Transfer: pseudo states against a plain run, layer by layer; what they see; who is trained when."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.methods import HiddenTransfer
from jaxspec.model.attention import Context
from jaxspec.model.base import Base
from tests.helpers.methods import batch_of, loss_and_gradient, predict, sequence, trained


@functools.partial(jax.jit, static_argnums=(0, 4))
def layer_by_layer(method, trainable, base, tokens, p):
    """Section 3.3 with the real text around: pseudo states of every step at its layer, one layer at a time.

    In training with real states, a pseudo state of step i sees the text up to its own position and nothing else.
    """
    real = method.train_visibility == "real" and not method.masked
    T, L = tokens.shape[1], base.decoder.config.num_layers
    x, positions = base.embed(tokens), list(range(T))
    for layer in range(L):
        for i, at in enumerate(method.layers, 1):
            if at == layer:
                x = jnp.concatenate([x, x[:, p : p + 1] @ trainable[f"step{i}"]], axis=1)
                positions.append(p + i)
        R = len(positions)
        mask = np.zeros((R, R), bool)
        mask[:T, :T] = np.tri(T, dtype=bool)
        for row in range(T, R):
            i = row - T + 1
            mask[row, : p + i if real else p + 1] = True
            mask[row, row] = True
            if not real and not method.masked:
                mask[row, T : row + 1] = True
        x, _ = base.rows(x, Context(jnp.array(positions)[None], jnp.array(mask)[None, None]), (layer, layer + 1))
    return base.logits(x[:, T:])


@functools.partial(jax.jit, static_argnums=0)
def predict_in_training(method, trainable, base, batch):
    """Logits [B, G, M, V] of what training sees, which may not be what decoding does."""
    exits = method.probe(trainable, base, batch, 3, training=True)[1]
    return method.read(trainable, base, exits, jnp.arange(1, 4))


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        pytest.param((1, 1, 2), {}, marks=pytest.mark.slow),
        ((0, 1, 2), {"masked": True}),
        pytest.param((0, 1, 2), {"train_visibility": "real"}, marks=pytest.mark.slow),
        pytest.param((0, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), {}, marks=pytest.mark.slow),
        pytest.param((0, 1, 2), {"train_visibility": "real", "masked": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pseudo_states_are_those_of_the_paper(tiny, layers, options):
    base, tokens, p = Base(tiny.params, tiny.decoder), sequence(tiny), 6
    method = HiddenTransfer(layers=layers, **options)
    trainable = trained(method, base)
    predicted = np.asarray(predict_in_training(method, trainable, base, batch_of(tokens, [[12, p]])))[0, 1]
    np.testing.assert_allclose(predicted, layer_by_layer(method, trainable, base, tokens, p)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_accuracies_are_those_of_decoding_whatever_training_saw(tiny):
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny), [[3, 9]])
    ours = HiddenTransfer(distances=2, layers=(0, 1))
    paper = dataclasses.replace(ours, train_visibility="real")
    trainable = trained(ours, base)
    np.testing.assert_array_equal(predict(paper, trainable, base, batch), predict(ours, trainable, base, batch))
    losses = [jax.jit(method.loss, static_argnums=3)(trainable, base, batch, 1)[0] for method in (paper, ours)]
    assert losses[0] != losses[1]


def test_an_untrained_map_copies_its_owners_state(tiny):
    base, method = Base(tiny.params, tiny.decoder), HiddenTransfer(layers=(1, 1, 1))
    owners = jax.random.normal(jax.random.key(1), (2, 5, 32))
    distance = jnp.array([[1, 2, 3, 2, 1]] * 2)
    pseudo = method.enter(method.init(jax.random.key(0), base), (1, 2, 3), distance, distance, owners)
    np.testing.assert_array_equal(pseudo, owners)


@pytest.mark.slow
def test_a_stage_computes_its_own_step_and_those_before(tiny):
    """The loss of stage i is that of step i alone, and later maps play no part in it (3.3)."""
    base, method = Base(tiny.params, tiny.decoder), HiddenTransfer(distances=2, layers=(0, 1))
    batch, trainable = batch_of(sequence(tiny), [[3, 9, 12]]), trained(method, base)
    every = dataclasses.replace(method, training="joint")
    (joint, metrics), _ = loss_and_gradient(every, trainable, base, 0, batch)
    losses = []
    for stage in range(2):
        (loss, own), gradients = loss_and_gradient(method, trainable, base, stage, batch)
        losses.append(loss)
        assert set(own) == {f"top1@{stage + 1}"} and own[f"top1@{stage + 1}"] == metrics[f"top1@{stage + 1}"]
        moved = [name for name, g in gradients.items() if np.any(g != 0)]
        assert moved == [f"step{i}" for i in range(1, stage + 2)]  # the trainer freezes all but the last
    np.testing.assert_allclose(joint, np.mean(losses), rtol=1e-5)
    assert [stage.trains for stage in method.stages] == [("step1",), ("step2",)]

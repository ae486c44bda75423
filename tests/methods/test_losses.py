"""The losses of future tokens, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxspec.decoding.method import Batch
from jaxspec.methods.losses import future_loss, overlap
from tests.helpers.model import quick_jit

# two groups make fewer predictions than there are rows, nine make more
every_way = pytest.mark.parametrize(
    ("groups", "direction"),
    [
        (2, "reverse"),
        (9, "forward"),
        pytest.param(2, "forward", marks=pytest.mark.slow),
        pytest.param(9, "reverse", marks=pytest.mark.slow),
    ],
)


def drawn(texts, groups):
    """Tokens [B, 12], their hidden states, and logits [B, G, 2, 16]."""
    rng = np.random.default_rng(0)
    frozen, student = (jnp.asarray(rng.normal(size=(texts, *s)), jnp.float32) for s in ((12, 32), (groups, 2, 16)))
    return jnp.asarray(rng.integers(0, 16, (texts, 12))), frozen, student


@every_way
def test_divergence_from_the_base(tiny, groups, direction):
    """The mean of Kullback-Leibler divergences over the targets there are, and its gradient."""
    tokens, frozen, student = drawn(2, groups)
    points = np.arange(2 * groups).reshape(2, groups) % 9
    points[1, 0] = -1  # no insertion point
    batch = Batch(tokens, np.array([12, 10]), np.array([1, 2]), points)

    def by_hand(student, _):
        terms = []
        for b, g, d in np.ndindex(2, groups, 2):
            source = int(points[b, g]) + d + 1
            if points[b, g] >= 0 and source + 1 < batch.lengths[b]:
                p, q = (jax.nn.log_softmax(x) for x in (tiny.base.logits(frozen[b, source]), student[b, g, d]))
                p, q = (p, q) if direction == "forward" else (q, p)
                terms.append(0.5**d * jnp.sum(jnp.exp(p) * (p - q)))
        return sum(terms) / len(terms)

    def loss(student, batch):
        return future_loss(student, tiny.base, frozen, batch, (1, 2), direction=direction, decay=0.5)[0]

    found, expected = (quick_jit(jax.value_and_grad(f))(3 * student, batch) for f in (loss, by_hand))
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=1e-6)


@every_way
def test_the_teacher_is_constant(tiny, groups, direction):
    """Where the base is tuned too: a student that does not depend on it gives neither it nor the text a gradient."""
    tokens, frozen, student = drawn(1, groups)
    batch = Batch(tokens, np.array([12]), np.array([1]), np.arange(groups)[None])

    def loss(base, frozen, student, batch):
        return future_loss(student, base, frozen, batch, (1, 2), direction=direction)[0]

    of_base, of_text, of_student = quick_jit(jax.grad(loss, (0, 1, 2)))(tiny.base, frozen, student, batch)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((of_base, of_text)))
    assert np.any(of_student)


def test_labels_and_accuracies(tiny):
    """Cross-entropy of the token after the row ahead; a prediction is right where no token is likelier."""
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    batch = Batch(tokens, np.array([7]), np.array([0]), np.array([[0, 3, 4]]))
    student = np.zeros((1, 3, 2, 16), np.float32)
    student[0, 0, 0, 4], student[0, 1, 0, 7], student[0, 0, 1, 1] = 2.0, 1.0, 1.0

    @quick_jit
    def loss_of(student, base, batch):
        return future_loss(student, base, jnp.zeros((1, 8, 32)), batch, (1, 2), alignment=0.0, labels=1.0)

    loss, metrics = loss_of(student, tiny.base, batch)
    # targets: after 0 the tokens at 2 and 3, after 3 those at 5 and 6, after 4 the one at 6 (7 lies behind the text)
    log_p = log_softmax(student[0], axis=-1)
    found = [log_p[g, d, label] for g, d, label in ((0, 0, 4), (0, 1, 1), (1, 0, 9), (1, 1, 2), (2, 0, 2))]
    np.testing.assert_allclose(loss, -np.mean(found), rtol=1e-5)
    np.testing.assert_allclose([metrics["top1@1"], metrics["top1@2"]], [2 / 3, 1])


@pytest.mark.parametrize("groups", [2, 8])
def test_the_overlap_is_the_chance_to_be_taken(tiny, groups):
    """Of tokens that are not drafted the base's share is lost. Of few predictions and of more than there are rows."""
    _, frozen, student = drawn(1, groups)
    source, ids = np.arange(groups)[None, :, None] + [[[1, 2]]], [7, 0, 3, 12, 5, 9]
    p = softmax(np.asarray(tiny.base.logits(frozen))[0][source[0]], axis=-1)
    for base, ours in ((tiny.base, p), (tiny.base.drafting(jnp.array(ids)), p[..., ids])):
        q = student[..., : ours.shape[-1]]
        expected = np.minimum(ours, softmax(np.asarray(q[0]), axis=-1)).sum(axis=-1)
        np.testing.assert_allclose(overlap(q, base, frozen, source)[0], expected, atol=1e-5)

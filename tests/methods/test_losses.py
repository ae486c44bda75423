"""The losses of future tokens, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafting.method import Batch
from jaxspec.methods.losses import future_loss


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("groups", [2, 9], ids=["fewer predictions than rows", "more predictions than rows"])
def test_divergence_from_the_base(tiny, groups, direction):
    """The mean of Kullback-Leibler divergences over the targets there are, and its gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, frozen = jax.random.randint(keys[0], (2, 12), 0, 16), jax.random.normal(keys[1], (2, 12, 32))
    student = 3 * jax.random.normal(keys[2], (2, groups, 2, 16))
    points = jnp.arange(2 * groups).reshape(2, groups) % 9
    points = points.at[1, 0].set(-1)  # no insertion point
    batch = Batch(tokens, jnp.array([12, 10]), jnp.array([1, 2]), points)

    def by_hand(student):
        terms = []
        for b, g, d in np.ndindex(2, groups, 2):
            source = int(points[b, g]) + d + 1
            if points[b, g] >= 0 and source + 1 < batch.lengths[b]:
                p, q = (jax.nn.log_softmax(x) for x in (tiny.base.logits(frozen[b, source]), student[b, g, d]))
                p, q = (p, q) if direction == "forward" else (q, p)
                terms.append(0.5**d * jnp.sum(jnp.exp(p) * (p - q)))
        return sum(terms) / len(terms)

    def loss(student):
        return future_loss(student, tiny.base, frozen, batch, (1, 2), direction=direction, decay=0.5)[0]

    for ours, wanted in zip(jax.value_and_grad(loss)(student), jax.value_and_grad(by_hand)(student), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("groups", [2, 9], ids=["fewer predictions than rows", "more predictions than rows"])
def test_the_teacher_is_constant(tiny, groups, direction):
    """Where the base is tuned too: a student that does not depend on it gives neither it nor the text a gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, frozen = jax.random.randint(keys[0], (1, 12), 0, 16), jax.random.normal(keys[1], (1, 12, 32))
    batch = Batch(tokens, jnp.array([12]), jnp.array([1]), jnp.arange(groups)[None])

    def loss(base, frozen, student):
        return future_loss(student, base, frozen, batch, (1, 2), direction=direction)[0]

    student = jax.random.normal(keys[2], (1, groups, 2, 16))
    of_base, of_text, of_student = jax.grad(loss, (0, 1, 2))(tiny.base, frozen, student)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((of_base, of_text)))
    assert np.any(of_student)


def test_labels_and_accuracies(tiny):
    """Cross-entropy of the token after the row ahead; a prediction is right where no token is likelier."""
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    batch = Batch(tokens, jnp.array([7]), jnp.array([0]), jnp.array([[0, 3, 4]]))
    student = jnp.zeros((1, 3, 2, 16)).at[0, 0, 0, 4].set(2.0).at[0, 1, 0, 7].set(1.0).at[0, 0, 1, 1].set(1.0)
    loss, metrics = future_loss(student, tiny.base, jnp.zeros((1, 8, 32)), batch, (1, 2), alignment=0.0, labels=1.0)
    # targets: after 0 the tokens at 2 and 3, after 3 those at 5 and 6, after 4 the one at 6 (7 lies behind the text)
    log_p = np.asarray(jax.nn.log_softmax(student[0]))
    found = [log_p[g, d, label] for g, d, label in ((0, 0, 4), (0, 1, 1), (1, 0, 9), (1, 1, 2), (2, 0, 2))]
    np.testing.assert_allclose(loss, -np.mean(found), rtol=1e-5)
    np.testing.assert_allclose([metrics["top1@1"], metrics["top1@2"]], [2 / 3, 1])

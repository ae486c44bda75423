"""What the tests of all methods need: names for settings, batches, and trained pytrees without training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.method import Batch
from jaxspec.decoding.tree import Tree
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.budget import Budget
from jaxspec.drafters.drafter import Drafter, make_drafter
from jaxspec.drafters.source import Source
from jaxspec.methods.rest import Rest, build
from jaxspec.trees import TreePlan, chain


def settings(method):
    """A test's name for a method: the settings that are not its defaults."""
    changed = {k: v for k, v in vars(method).items() if getattr(type(method)(), k) != v}
    changed = [k if isinstance(v, ModelConfig) else f"{k}={v}" for k, v in changed.items()]
    return "-".join([method.name, *changed])


def trained(method, base, seed=3, scale=0.1, noise=9):
    """A pytree in which nothing is zero, the identity, the base's, or equal among the rows of a probe.

    Of a method that drafts from texts, eight random ones.
    """
    rng = np.random.default_rng(noise)  # not in JAX, which would compile a program for every shape
    if isinstance(method, Rest):
        tokens = rng.integers(0, base.vocab_size, method.size - 9)
        return build(np.array_split(tokens, 8), longest=method.longest)[1]
    trainable = jax.jit(lambda base: method.init(jax.random.key(seed), base))(base)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + scale * rng.normal(size=x.shape), jnp.float32), trainable)


def sequence(tiny, length=20, seed=0):
    """Token ids [1, T]."""
    return jnp.array(np.random.default_rng(seed).integers(0, tiny.config.vocab_size, (1, length)), jnp.int32)


def batch_of(tokens, points, lengths=None):
    """Texts [B, T] whose answers start at 1, with their insertion points [B, G]; -1 is none."""
    lengths = [tokens.shape[1]] * tokens.shape[0] if lengths is None else lengths
    return Batch(tokens, jnp.array(lengths), jnp.ones(tokens.shape[0], jnp.int32), jnp.array(points))


@functools.partial(jax.jit, static_argnums=0)
def predict(method, trainable, base, batch):
    """Logits [B, G, M, V] of training."""
    return method.predictions(trainable, base, batch)


@functools.partial(jax.jit, static_argnums=(0, 3))
def loss_and_gradient(method, trainable, base, stage, batch):
    """((loss, metrics), gradients)."""
    return jax.value_and_grad(lambda t: method.loss(t, base, batch, stage), has_aux=True)(trainable)


@dataclasses.dataclass(frozen=True)
class FixedTree(TreePlan):
    """A plan that stands for arrays which were made, or padded, by a test."""

    states: tuple = ()
    tree: Tree | None = None

    @property
    def num_nodes(self):
        return self.tree.num_nodes

    @property
    def num_probes(self):
        return self.tree.num_probes

    def arrays(self, distances):
        return self.tree


def untrained_drafter(method, model, tree, trainable=None):
    """A drafter whose every part matters: nothing of it is zero, the identity, or a copy of the base's.

    Its tree is a plan, or arrays with an axis of states.
    """
    if trainable is None:
        trainable = trained(method, model.base, seed=1, scale=0.3, noise=2)
    drafter = make_drafter(Adapter(method, trainable, model.fingerprint, {}), model, chain(1))
    return dataclasses.replace(drafter, shape=tree if isinstance(tree, TreePlan) else FixedTree(tree=tree))


def union(methods, model, rows):
    """A drafter of several methods, with random weights that all matter, whose drafts are chosen per step."""
    return Drafter(tuple(source(method, model) for method in methods), model, Budget(rows))


def source(method, model):
    """One of them; what is trained has a tree to expand."""
    if not method.facts(model.config).adapter:
        return Source(method, {}, model.config)
    trainable = trained(method, model.base, seed=1, scale=0.3, noise=2)
    final = method.finalize(trainable, model.base)
    method, trainable = final.method, final.trainable
    info = {"tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}
    return Source(method, trainable, model.config, Adapter(method, trainable, model.fingerprint, info))

"""Random trees, random accuracies to build them from, and what a tree was built from."""

import random

import numpy as np


def random_paths(seed, depth=4, ranks=4):
    """A random tree, its paths shuffled."""
    rng = random.Random(seed)
    nodes = [()]
    for _ in range(rng.randrange(25)):
        path = (*rng.choice(nodes), rng.randrange(ranks))
        if path not in nodes and len(path) <= depth:
            nodes.append(path)
    rng.shuffle(paths := nodes[1:])
    return paths


def random_accuracy(seed, distances, ranks):
    """[M, K], not sorted by rank, which nothing promises; now and then no candidate is right."""
    rng = np.random.default_rng([seed, distances, ranks])
    return rng.dirichlet(np.full(ranks + 1, 0.7), size=distances)[:, :ranks]


def tree_paths(tree):
    """The paths a tree was built from, padding left out."""
    paths = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parent[node]], int(tree.rank[node])))
    return [path for path, live in zip(paths, tree.live, strict=True) if live and path]

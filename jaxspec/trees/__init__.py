"""The search for fixed draft trees, on the host: topologies in words of paths."""

from jaxspec.trees.builders import cartesian, chain, efficient, medusa, random_tree, sparse_tree, straightforward
from jaxspec.trees.dynamic import dynamic_sparse_tree
from jaxspec.trees.plan import State, TreePlan, expected, from_paths, make_plan, replayed
from jaxspec.trees.spec import load_plan, parse_tree, save_plan
from jaxspec.trees.stripped import stripped_tree

__all__ = [
    "State",
    "TreePlan",
    "cartesian",
    "chain",
    "dynamic_sparse_tree",
    "efficient",
    "expected",
    "from_paths",
    "load_plan",
    "make_plan",
    "medusa",
    "parse_tree",
    "random_tree",
    "replayed",
    "save_plan",
    "sparse_tree",
    "straightforward",
    "stripped_tree",
]

"""Draft trees: topologies in words of paths, and as static arrays."""

from jaxspec.drafting.tree.builders import (
    cartesian,
    chain,
    efficient,
    medusa,
    random_tree,
    sparse_tree,
    straightforward,
)
from jaxspec.drafting.tree.dynamic import dynamic_sparse_tree
from jaxspec.drafting.tree.plan import State, TreePlan, expected, from_paths, make_plan, replayed
from jaxspec.drafting.tree.spec import load_plan, parse_tree, save_plan
from jaxspec.drafting.tree.stripped import stripped_tree
from jaxspec.drafting.tree.tree import (
    Path,
    Tree,
    build_tree,
    check_paths,
    pad_tree,
    select_trees,
    stack_trees,
)

__all__ = [
    "Path",
    "State",
    "Tree",
    "TreePlan",
    "build_tree",
    "cartesian",
    "chain",
    "check_paths",
    "dynamic_sparse_tree",
    "efficient",
    "expected",
    "from_paths",
    "load_plan",
    "make_plan",
    "medusa",
    "pad_tree",
    "parse_tree",
    "random_tree",
    "replayed",
    "save_plan",
    "select_trees",
    "sparse_tree",
    "stack_trees",
    "straightforward",
    "stripped_tree",
]

"""Draft trees: topologies as static arrays."""

from jaxspec.tree.builders import sparse_paths
from jaxspec.tree.tree import Path, Tree, build_tree, check_paths, tree_paths

__all__ = ["Path", "Tree", "build_tree", "check_paths", "sparse_paths", "tree_paths"]

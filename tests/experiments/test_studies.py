"""The tables: settings that fit the embedded base, trees that fit their methods, rows that exist."""

import dataclasses

import jax
import pytest

from experiments.decoding_studies import DECODING_STUDIES, SAMPLED
from experiments.studies import STUDIES
from jaxspec.decoding.method import abstract_trainable
from jaxspec.drafters import METHODS
from jaxspec.drafters.drafter import method_plan
from jaxspec.training.run_config import load_config
from jaxspec.trees import TreePlan
from jaxspec.weights.shapes import SMOLLM2_135M

TRAINED = {study.name: study.rows for study in STUDIES}
SHIPPED = {name: f"{name}_smollm2" for name, method in METHODS.items() if method().facts(SMOLLM2_135M).trained}
SHIPPED |= {"space": "space_smollm2_lora", "draft_model": "draft_smollm2"}


@pytest.mark.slow
def test_every_study_fits_the_embedded_base():
    studies = (*STUDIES, *DECODING_STUDIES)
    assert len({study.name for study in studies}) == len({study.title for study in studies}) == len(studies)
    narrow = dataclasses.replace(SMOLLM2_135M, vocab_size=64)
    for method in {row.method for rows in TRAINED.values() for row in rows.values()}:
        assert jax.tree.leaves(abstract_trainable(method, narrow))


@pytest.mark.slow
def test_every_entry_has_a_tree_for_its_method():
    for entry in [entry for study in DECODING_STUDIES for entry in study.rows.values()] + [*SAMPLED.values()]:
        if isinstance(entry.adapter, str):
            method = load_config(SHIPPED[entry.adapter]).method
        else:
            method = TRAINED[entry.adapter[0]][entry.adapter[1]].method
        tree, accuracy = entry.tree, [[0.1] * 10] * method.facts(SMOLLM2_135M).distances
        plan = tree if isinstance(tree, TreePlan) else method_plan(method, SMOLLM2_135M, tree, accuracy)
        assert plan.depth <= method.facts(SMOLLM2_135M).distances

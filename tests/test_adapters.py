"""The adapters that ship: what they learnt, and that the documents say so."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.drafters import METHODS
from jaxspec.training.evaluate import top
from jaxspec.weights.shapes import SMOLLM2_135M

ROOT = Path(__file__).parents[1]
ADAPTERS = {file.parent.name: json.loads(file.read_text()) for file in ROOT.glob("adapters/*/adapter.json")}
SHIPPED = {
    name.split("-")[0]: adapter
    for name, adapter in ADAPTERS.items()
    if name.endswith("-smollm2-135m") and METHODS[adapter["method"]]().facts(SMOLLM2_135M).trained
}
PROTOTYPE = {1: (0.419, 0.235, 0.162), 5: (0.727, 0.551, 0.436), 10: (0.814, 0.664, 0.571)}  # of BiTA, in an hour


def test_every_trained_method_ships():
    assert SHIPPED.keys() == {name for name, method in METHODS.items() if method().facts(SMOLLM2_135M).trained}


@pytest.mark.parametrize("k", PROTOTYPE)
def test_bita_has_learnt_more_than_a_prototype_and_hidden_transfer_more_than_bita(k):
    bita, transfer = (top(SHIPPED[name]["accuracy"], k) for name in ("bita", "hidden_transfer"))
    assert np.all(bita > PROTOTYPE[k]) and np.all(transfer > bita)
    assert all(SHIPPED[name]["data"]["answers_seen"] >= 2000 for name in ("bita", "hidden_transfer"))


@pytest.mark.parametrize("name", SHIPPED)
def test_documents_give_the_accuracies_of_the_adapters(name):
    [line] = [x for x in (ROOT / "docs/adapters.md").read_text().splitlines() if x.startswith(f"| `{name}`")]
    for cell, k in zip(line.split("|")[2:5], (1, 5, 10), strict=True):
        assert cell.strip() == " / ".join(f"{value:.3f}"[1:] for value in top(SHIPPED[name]["accuracy"], k)[:3])

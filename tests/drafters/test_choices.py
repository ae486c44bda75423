"""Choices beside an adapter: kept by circumstances, found again on the same machine, autoregressive among them."""

import dataclasses
import json

import jax
import pytest

import jaxspec.drafters.choices as tuned
from jaxspec.drafters import load_adapter, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.choices import TunedChoice, find_choice, save_choice
from jaxspec.errors import UserError
from jaxspec.machine import this_machine
from jaxspec.methods import PPD
from jaxspec.model.base import Base
from jaxspec.trees import chain, dynamic_sparse_tree

ACCURACY = [[0.5, 0.2, 0.1], [0.3, 0.1, 0.1], [0.2, 0.1, 0.0]]


@pytest.fixture
def folder(tiny, tmp_path):
    trainable = PPD().init(jax.random.key(0), Base(tiny.params, tiny.decoder))
    info = {"accuracy": ACCURACY, "base": "tiny", "tree": [[0], [1]]}
    save_adapter(tmp_path / "a", Adapter(PPD(), trainable, tiny.fingerprint, info))
    return tmp_path / "a"


@pytest.fixture
def choice(tiny, folder):
    """A choice for the adapter of `folder`."""
    digest = load_adapter(folder, tiny.config).digest
    made = TunedChoice(this_machine(), "float32", digest, 1, 512, 0.0, None, "a tree", {"trials": []})
    return lambda tree, **changes: dataclasses.replace(made, tree=tree, **changes)


@pytest.fixture
def find(tiny, folder):
    drafter = load_drafter("ppd", tiny, folder)
    return lambda **asked: find_choice(folder, drafter, **asked)


def test_a_choice_comes_back_and_replaces_the_older_one(folder, choice, find):
    assert find() is None
    save_choice(folder, "ppd", choice(chain(2)))
    plan = dynamic_sparse_tree(ACCURACY, 12)
    save_choice(folder, "ppd", choice(plan))
    save_choice(folder, "ppd", choice(chain(1), batch_size=8))
    save_choice(folder, "ppd", choice(None, temperature=1.0))
    assert find().tree.states == plan.states
    assert find(batch_size=6).tree.states == chain(1).states
    assert find(batch_size=64) is None
    assert find(temperature=0.8).tree is None and find().tree is not None  # greedy or sampled: not the other's
    assert len(json.loads((folder / "tuned.json").read_text())["choices"]) == 3
    save_choice(folder, "ppd", choice(chain(3), cache_length=4096))
    assert find().tree.states == chain(3).states  # the newest of equals
    assert not list(folder.glob(".*"))


def test_only_choices_for_this_machine_this_adapter_and_this_dtype_count(folder, choice, find, monkeypatch):
    save_choice(folder, "ppd", choice(chain(2), dtype="bfloat16"))
    save_choice(folder, "ppd", choice(chain(2), adapter="0" * 12))
    assert find() is None
    save_choice(folder, "ppd", choice(chain(2)))
    assert find() is not None
    assert len(json.loads((folder / "tuned.json").read_text())["choices"]) == 3  # another adapter's stays
    monkeypatch.setattr(tuned, "this_machine", lambda: {"platform": "gpu", "device": "another"})
    assert find() is None and find(anywhere=True) is not None
    save_choice(folder, "ppd", choice(None))
    assert find(anywhere=True).dtype == "bfloat16"  # that nothing pays elsewhere says nothing here


def test_what_another_processor_was_tuned_with_counts_until_this_one_is(folder, choice, find, monkeypatch):
    there = {"platform": "cpu", "device": "cpu", "cores": 2, "processor": "theirs"}
    save_choice(folder, "ppd", choice(chain(2), machine=there))
    monkeypatch.setattr(tuned, "this_machine", lambda: there | {"processor": "ours"})
    assert find().tree.states == chain(2).states
    monkeypatch.setattr(tuned, "this_machine", lambda: there | {"cores": 4})
    assert find() is None
    monkeypatch.setattr(tuned, "this_machine", lambda: there | {"processor": "ours"})
    save_choice(folder, "ppd", choice(None, machine=there))
    assert find() is None  # that nothing pays there says nothing here
    save_choice(folder, "ppd", choice(chain(1), machine=there | {"processor": "ours"}, batch_size=2))
    save_choice(folder, "ppd", choice(chain(2), machine=there))
    assert find().tree.states == chain(1).states  # before what is nearer otherwise


def test_auto_falls_back_says_so_and_takes_autoregressive_for_an_answer(tiny, folder, choice):
    def load():
        return load_drafter("ppd", tiny, folder, tree="auto")

    assert load().source.method == PPD() and load().plan.num_nodes == 3 and "never tuned" in load().note
    save_choice(folder, "ppd", choice(chain(2)))
    assert load().plan.states == chain(2).states and "a tree" in load().note
    save_choice(folder, "ppd", choice(chain(1), machine=this_machine() | {"processor": "another"}))
    assert load().plan.states == chain(2).states and load().note.startswith("tuned for this machine")
    (folder / "tuned.json").unlink()
    save_choice(folder, "ppd", choice(chain(1), machine=this_machine() | {"processor": "another"}))
    assert load().plan.states == chain(1).states and load().note.startswith("tuned for another machine")
    save_choice(folder, "ppd", choice(None))
    assert load().name == "autoregressive" and "no tree of ppd pays" in load().note
    assert "drafts nothing" in load_drafter("autoregressive", tiny, tree="auto").note


def test_bad_files_are_named(tiny, folder, choice, find):
    save_choice(folder, "ppd", choice(chain(2)))
    file = folder / "tuned.json"
    content = json.loads(file.read_text())
    for changed, message in (
        (content | {"method": "bita"}, "belong to method 'bita', not 'ppd'"),
        (content | {"choices": [{"tree": None}]}, "not written by `jaxspec tune`"),
        ({"method": "ppd"}, "not written by `jaxspec tune`"),
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            find()
    (folder / "b").mkdir()
    save_choice(folder / "b", "ppd", choice(chain(4)))
    with pytest.raises(UserError, match="1 to 3 candidates deep, not 4"):
        (folder / "b" / "tuned.json").rename(file)
        load_drafter("ppd", tiny, folder, tree="auto")

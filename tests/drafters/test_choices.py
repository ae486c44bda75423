"""Choices beside an adapter: kept by circumstances, found again on the same machine, autoregressive among them."""

import dataclasses
import json

import jax
import pytest

import jaxspec.drafters.choices as tuned
from jaxspec.drafters import choice_folder, choose_tree, load_adapter, load_drafter
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
    drafter = load_drafter("ppd", tiny, folder, tree="own")
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
    monkeypatch.setattr(tuned, "this_machine", lambda: this_machine() | {"processor": "another"})
    assert find() is None


@pytest.mark.parametrize("tree", [None, "auto"])
def test_what_was_tuned_wins_over_the_default(tiny, folder, choice, tree):
    def load(temperature=0.0):
        return load_drafter("ppd", tiny, folder, tree=tree, temperature=temperature)

    default = load()
    assert default.source.method == PPD() and default.shape.sizes[0].rows == 1
    assert "costs of rows are typical ones of a CPU to begin with" in default.note
    save_choice(folder, "ppd", choice(chain(2)))
    assert (
        load().plan.states == chain(2).states
        and load().note == "tuned for this machine: a tree (batch 1, temperature 0)"
    )
    assert load(temperature=1.0).shape == default.shape
    save_choice(folder, "ppd", choice(None))
    assert load().name == "autoregressive" and "no tree of ppd pays" in load().note


def test_a_choice_counts_only_where_it_fits_all_that_is_decoded(tiny, folder, choice):
    """Without a temperature, and in a server, that is greedy and sampled text; a server fills its slots."""

    def tuned_for(**use):
        return "tuned" in load_drafter("ppd", tiny, folder, **use).note

    save_choice(folder, "ppd", choice(chain(2), batch_size=8))
    assert tuned_for(batch_size=8, temperature=0.0)
    assert not tuned_for(batch_size=8) and not tuned_for(slots=8)
    save_choice(folder, "ppd", choice(chain(3), batch_size=8, temperature=0.8))
    assert not tuned_for(slots=8)  # another tree is better when sampling
    save_choice(folder, "ppd", choice(chain(2), batch_size=8, temperature=0.8))
    assert tuned_for(batch_size=8) and tuned_for(slots=8) and not tuned_for(slots=32) and not tuned_for()
    default = load_drafter("ppd", tiny, folder, slots=32)
    assert default.shape == load_drafter("ppd", tiny, folder).shape  # of one text


def test_a_choice_for_all_temperatures_calibrates_for_each(tiny, folder, choice):
    greedy, sampled = ([[a, 0.0]] * 3 for a in (2.0, 3.0))
    save_choice(folder, "ppd", choice(chain(2), calibration={"ppd": greedy}))
    save_choice(folder, "ppd", choice(chain(2), temperature=0.8, calibration={"ppd": sampled}))
    drafter = load_drafter("ppd", tiny, folder)
    assert drafter.note == "tuned for this machine: a tree (batch 1, temperature 0 and 0.8)"
    assert drafter.source.calibrations().tables[:, 0, 0].tolist() == [2.0, 3.0]


def test_a_choice_for_an_adapter_without_a_folder_is_in_the_cache(tiny, folder, choice, tmp_path, monkeypatch):
    """As of a published drafter, which is read in memory, or of a module in the base's own files."""
    monkeypatch.setattr(tuned, "user_cache", lambda *names: tmp_path.joinpath("cache", *names))
    drafter = load_drafter("ppd", tiny, folder)
    adapter = dataclasses.replace(drafter.source.adapter, folder=None)
    drafter = dataclasses.replace(drafter, sources=(dataclasses.replace(drafter.source, adapter=adapter),))
    greedy = tuned.Use(temperature=0.0)
    assert "tuned for this machine" not in choose_tree(drafter, greedy).note
    cached = choice_folder(drafter)
    assert cached == tmp_path / "cache" / "unions" / "ppd"
    cached.mkdir(parents=True)
    save_choice(cached, "ppd", choice(chain(2)))
    assert "tuned for this machine: a tree" in choose_tree(drafter, greedy).note


def test_what_drafts_nothing_has_no_tree_to_choose(tiny):
    assert load_drafter("autoregressive", tiny).note == ""
    assert "drafts nothing" in load_drafter("autoregressive", tiny, tree="auto").note


def test_own_is_the_tree_of_the_adapter(tiny, folder, choice):
    save_choice(folder, "ppd", choice(chain(2)))
    assert load_drafter("ppd", tiny, folder, tree="own").plan.num_nodes == 3


def test_a_damaged_file_is_said_and_left_unless_it_is_asked_for(tiny, folder):
    (folder / "tuned.json").write_text("{")
    drafter = load_drafter("ppd", tiny, folder)
    assert drafter.shape.sizes and "warning: " in drafter.note and "tuned.json" in drafter.note
    with pytest.raises(UserError, match=r"tuned\.json"):
        load_drafter("ppd", tiny, folder, tree="auto")


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
        load_drafter("ppd", tiny, folder, tree="auto", temperature=0.0)

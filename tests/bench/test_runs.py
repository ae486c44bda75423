"""The names of the drafters that are compared, and the ways to decode that they become."""

import dataclasses
import shutil

import pytest

import jaxspec.bench.ways
from jaxspec.bench.config import AGAIN, REFERENCE, BenchConfig, name_runs
from jaxspec.bench.ways import load_ways
from jaxspec.drafters import DrafterSpec, open_adapter
from jaxspec.drafters.choices import TunedChoice, save_choice
from jaxspec.errors import UserError
from jaxspec.machine import this_machine
from jaxspec.methods import SPACE
from jaxspec.trees import chain
from tests.helpers.bench import config_of, save_untrained


def test_names_tell_runs_apart():
    named = name_runs(["ppd", "ppd vocabulary=0 tree=chain:2", REFERENCE, REFERENCE])
    assert list(named) == [REFERENCE, "ppd", "ppd tree=chain:2 vocabulary=0", AGAIN]
    assert list(name_runs(["bita adapter=a/one"])) == [REFERENCE, "bita"]
    assert list(name_runs(["bita", "bita adapter=a/one"])) == [REFERENCE, "bita", "bita adapter=a/one"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["ppd chain:2"], "drafter 'ppd chain:2': got 'chain:2'"),
        (["ppd", "ppd"], "two runs are called 'ppd'"),
        (["ppd tree=a vocabulary=1", "ppd vocabulary=1 tree=a"], "two runs are called 'ppd tree=a vocabulary=1'"),
        (["autoregressive"] * 3, "two runs are called 'autoregressive again'"),
    ],
)
def test_what_makes_no_sense_is_refused(runs, message):
    with pytest.raises(UserError) as error:
        name_runs(runs)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_is_loaded_once(files, model, monkeypatch):
    loaded, load = [], jaxspec.bench.ways.load_drafter
    monkeypatch.setattr(
        jaxspec.bench.ways, "load_drafter", lambda *args, **tree: loaded.append(args[0]) or load(*args, **tree)
    )
    ways = load_ways(config_of(files, "ppd tree=own", "ppd tree=cartesian:2,1", "medusa"), model)
    assert list(ways) == ["autoregressive", "ppd tree=own", "ppd tree=cartesian:2,1", "medusa"]
    assert ways["ppd tree=own"].drafter.plan.num_nodes == 4 and ways["ppd tree=own"].bytes > 0
    assert ways["medusa"].drafter.shape.sizes
    assert [DrafterSpec(spec.methods).text for spec in loaded] == ["autoregressive", "ppd", "medusa"]


def test_a_tuned_base_is_shared(model, tmp_path):
    for name in ("one", "two"):
        save_untrained(tmp_path / name / "space", SPACE(distances=2, rank=2), model, 0.1)
    one, two = (f"adapter={tmp_path}/{name}/space" for name in ("one", "two"))
    ways = load_ways(BenchConfig(runs=(f"space {one}", f"space tree=chain:1 {one}")), model)
    plain, first, second = list(ways.values())[1:]
    assert plain.model is first.model is second.model is not model
    assert first.reference == second.reference == "autoregressive, base of space adapter=space"
    with pytest.raises(UserError, match="adapters of space need folders with different names"):
        load_ways(BenchConfig(runs=(f"space {one}", f"space tree=chain:1 {two}")), model)


FREE = ["prompt_lookup", "suffix", "token_recycling", "lookahead", "jacobi"]


def test_what_ships_for_the_base_runs_by_default(files, model, monkeypatch):
    assert list(load_ways(BenchConfig(), model)) == ["autoregressive", *FREE]  # which need no adapter
    assert list(load_ways(BenchConfig(runs=("autoregressive",)), model)) == ["autoregressive"]
    shipped = {"ppd": files / "ppd", "medusa": files / "medusa"}
    monkeypatch.setattr("jaxspec.drafters.loading.find_shipped", lambda name, fingerprint: shipped.get(name))
    assert list(load_ways(BenchConfig(), model)) == ["autoregressive", "ppd", "medusa", *FREE]


def test_a_tuned_tree_is_the_one_for_these_circumstances(files, model, tmp_path):
    adapter = open_adapter("ppd", model, files / "ppd")
    shutil.copytree(files / "ppd", tmp_path / "ppd")
    for size, plan in ((1, chain(2)), (2, chain(1))):
        choice = TunedChoice(this_machine(), "float32", adapter.digest, size, 512, 0.0, plan, f"for {size}", {})
        save_choice(tmp_path / "ppd", "ppd", choice)
    config = config_of(tmp_path, "ppd tree=auto", batch_size=2)
    way = load_ways(config, model)["ppd tree=auto"]
    assert way.drafter.plan.num_nodes == 2 and way.info["note"].startswith("tuned for this machine: for 2")
    alone = load_ways(dataclasses.replace(config, batch_size=1), model)["ppd tree=auto"]
    assert alone.drafter.plan.num_nodes == 3 and alone.info["adapter"] == adapter.digest

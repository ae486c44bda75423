"""What a user writes of a run, and the ways that it becomes."""

import dataclasses
import shutil

import pytest

import jaxspec.bench.runs
from jaxspec.bench.config import BenchConfig
from jaxspec.bench.runs import AGAIN, REFERENCE, Run, name_runs, parse_run
from jaxspec.bench.ways import load_ways
from jaxspec.drafters import open_adapter
from jaxspec.drafters.choices import TunedChoice, save_choice
from jaxspec.errors import UserError
from jaxspec.machine import this_machine
from jaxspec.methods import SPACE
from jaxspec.trees import chain
from tests.helpers.bench import config_of, save_untrained


def test_settings_come_in_any_order(tmp_path):
    expected = Run("bita", "cartesian:2,1", 8192, f"{tmp_path}/my adapter")
    assert parse_run(f"bita 'adapter={tmp_path}/my adapter' vocabulary=8192  tree=cartesian:2,1") == expected
    (tmp_path / "my adapter").mkdir()
    assert expected.text == "bita tree=cartesian:2,1 vocabulary=8192 'adapter=my adapter'"
    assert expected.name == "bita tree=cartesian:2,1 vocabulary=8192" and parse_run(expected.name).adapter is None


def test_names_tell_runs_apart():
    named = name_runs(["ppd", "ppd vocabulary=0 tree=chain:2", REFERENCE, REFERENCE])
    assert list(named) == [REFERENCE, "ppd", "ppd tree=chain:2 vocabulary=0", AGAIN]
    assert list(name_runs(["bita adapter=a/one"])) == [REFERENCE, "bita"]
    assert list(name_runs(["bita", "bita adapter=a/one"])) == [REFERENCE, "bita", "bita adapter=a/one"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["medusaa"], "unknown method 'medusaa' (did you mean 'medusa'?)"),
        (["ppd=chain:2"], "expected METHOD[+METHOD...] [tree=SPEC] [vocabulary=N] [adapter=DIR]"),
        ([""], "unknown method ''"),
        (["ppd tre=chain:2"], "got 'tre=chain:2' (did you mean 'tree'?)"),
        (["ppd chain:2"], "got 'chain:2'"),
        (["ppd tree="], "got 'tree='"),
        (["ppd tree=chain:1 tree=chain:2"], "tree is given twice"),
        (["ppd vocabulary=x"], "vocabulary must be a whole number, got 'x'"),
        (["ppd tree=auto vocabulary=5"], "brings its own vocabulary"),
        (["ppd 'adapter=x"], "No closing quotation"),
        (["autoregressive tree=chain:2"], "autoregressive drafts nothing and takes no settings"),
        (["ppd", "ppd"], "two runs are called 'ppd'"),
        (["ppd tree=a vocabulary=1", "ppd vocabulary=1 tree=a"], "two runs are called 'ppd tree=a vocabulary=1'"),
        (["autoregressive"] * 3, "two runs are called 'autoregressive again'"),
    ],
)
def test_what_makes_no_sense_is_refused(runs, message):
    with pytest.raises(UserError) as error:
        name_runs(runs)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_draft_model_is_part_of_a_runs_name(tmp_path):
    """And its folders are named without the way to them."""
    (tmp_path / "small").mkdir()
    run = parse_run(f"draft_model draft={tmp_path}/small draft-adapter=owner/ppd tree=chain:4")
    assert run == Run("draft_model", "chain:4", draft=f"{tmp_path}/small", draft_adapter="owner/ppd")
    assert run.name == "draft_model tree=chain:4 draft=small draft-adapter=owner/ppd"


def test_an_adapter_is_loaded_once(files, model, monkeypatch):
    loaded, load = [], jaxspec.bench.runs.load_drafter
    monkeypatch.setattr(
        jaxspec.bench.runs, "load_drafter", lambda *args, **more: loaded.append(args[0]) or load(*args, **more)
    )
    ways = load_ways(config_of(files, "ppd", "ppd tree=cartesian:2,1", "medusa"), model)
    assert list(ways) == ["autoregressive", "ppd", "ppd tree=cartesian:2,1", "medusa"]
    assert ways["ppd"].drafter.plan.num_nodes == 4 and ways["ppd"].bytes > 0
    assert loaded == ["autoregressive", "ppd", "medusa"]


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

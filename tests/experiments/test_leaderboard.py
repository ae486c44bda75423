"""The leaderboard: what enters, what a row holds, that no stage is done twice, and the page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import experiments.leaderboard
import experiments.rows
from experiments.entries import Entry, find_entry
from experiments.leaderboard import Enter, enter_one
from experiments.leaderboard_page import read_rows, write_page
from experiments.prompts import prompts_digest
from experiments.rows import Row, Terms, enter, run_of, try_rate
from experiments.scores import NODES, accuracy, nodes_of, rows_of, same_tree
from jaxspec.config import DataConfig, TrainConfig
from jaxspec.drafting.draft import Offer
from jaxspec.drafting.source import Source
from jaxspec.errors import UserError
from jaxspec.methods import METHODS, PPD, BiTA, HiddenTransfer, Medusa, Suffix
from jaxspec.training.run_config import RunConfig
from jaxspec.training.trainer import Diverged, Trainer
from jaxspec.tuning.record import Recording

SMALL = Terms("tiny-text", updates=10, sequences=2, insertions=8, validation=3, held_out=6, answer_tokens=24)
PPD_ENTRY = Entry("ppd", RunConfig("tiny-text", PPD(), train=TrainConfig(learning_rate=1e-2)))


@pytest.fixture
def bigram(tmp_path):
    """The method of the page on adding one, in a file of its own."""
    known, file = dict(METHODS), tmp_path / "bigram.py"
    page = Path("docs/adding-a-method.md").read_text()
    file.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    yield f"{file}:Bigram"
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.slow
def test_the_method_of_the_page_enters(model, bigram, tmp_path, monkeypatch):
    """By name of file and class; its row and the page are written, and nothing is done twice."""
    entry = find_entry(bigram)
    rows = tmp_path / "rows"
    rows.mkdir()
    row = enter(entry, SMALL, model, tmp_path, rows, timed=False)
    scores = row["scores"]
    assert row["name"] == "bigram" and "training" not in row and scores["answers"] <= 6
    assert np.shape(scores["accuracy"]) == (3, 10)
    for part in ("alone", "joined"):
        assert [scores[part][str(nodes)]["rows"] for nodes in NODES] == [*NODES]
        assert all(scores[part][str(nodes)]["tokens_per_step"] >= 1 for nodes in NODES)
    assert scores["same"]["tokens_per_step"] == scores["own"]["tokens_per_step"]  # it has one candidate per distance
    assert json.loads((rows / "bigram.json").read_text()) == row
    monkeypatch.setattr(experiments.rows, "score", None)
    assert enter(entry, SMALL, model, tmp_path, rows, timed=False) == row
    assert "| 1 | `bigram` |" in write_page(rows, tmp_path).read_text()


@pytest.mark.slow
def test_a_trained_method_resumes_between_stages(model, tmp_path, monkeypatch):
    """Killed after every stage; each is done once, and the training has the best of three learning rates."""
    done = []

    def stand_in(result):
        return lambda *args: done.append("scored") or result

    def counted(real):
        return lambda run, *args: done.append(f"{run.train.steps} updates") or real(run, *args)

    monkeypatch.setattr(experiments.rows, "score", stand_in(row_of("ppd", 1.5)["scores"]))
    monkeypatch.setattr(experiments.rows, "time_steps", stand_in({"milliseconds": {"4": 2.5}, "machine": "this"}))
    for name in ("try_rate", "train_entry"):
        monkeypatch.setattr(experiments.rows, name, counted(getattr(experiments.rows, name)))
    real = experiments.rows.write_atomically

    def die_after_writing(file, content):
        real(file, content)
        if file.name == "ppd.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(experiments.rows, "write_atomically", die_after_writing)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            enter(PPD_ENTRY, SMALL, model, tmp_path, tmp_path, timed=True)
    row = enter(PPD_ENTRY, SMALL, model, tmp_path, tmp_path, timed=True)
    assert done == ["1 updates"] * 3 + ["10 updates", "scored", "scored"]
    assert [*row["rates"]] == ["0.0033", "0.01", "0.03"]
    training = row["training"]
    assert f"{training['learning_rate']:g}" == max(row["rates"], key=row["rates"].get)
    assert training["updates"] == 10 and 0 < training["answers_seen"] <= 20 and training["seconds"] > 0
    assert training["parameters"] == 3 * 32
    page = write_page(tmp_path, tmp_path).read_text()
    assert "## Training" in page and "## Steps" in page


def test_a_rate_that_diverges_is_worth_nothing(tmp_path, monkeypatch):
    class Diverging(Trainer):
        def __init__(self, config, model, output, resume):
            output.mkdir()

        def run(self):
            raise Diverged("loss or gradient is no longer finite")

    monkeypatch.setattr(experiments.rows, "Trainer", Diverging)
    assert try_rate(PPD_ENTRY.run, None, tmp_path / "run") == 0 and not (tmp_path / "run").exists()


def test_budgets_are_equal_and_the_rest_is_the_methods_own():
    data, entry = DataConfig(), find_entry("hydra")
    run = run_of(entry, Terms(), data, 2e-3, 50)
    train, own = run.train, entry.run.train
    assert (train.steps, train.batch_size, train.insertions, train.learning_rate) == (50, 4, 48, 2e-3)
    assert (train.clip, train.adapter_dtype, train.microbatch) == (own.clip, own.adapter_dtype, own.microbatch)
    assert run.method == entry.method == find_entry("hydra_smollm2").method != METHODS["hydra"]()
    assert Terms().times(0.1).updates == 50
    passes = {"ppd": 0, "hidden_transfer": 2}  # of four sequences and of two, as their configs have them
    assert {name: run_of(find_entry(name), Terms(), data, 1e-3, 50).train.microbatch for name in passes} == passes
    with pytest.raises(UserError, match="multiple 0 of 500 updates is none"):
        Terms().times(0)


def test_what_cannot_enter(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "ppd.py").write_text("import jaxspec.methods\nclass Other(jaxspec.methods.Suffix):\n    name = 'ppd'\n")
    for word, message in {
        "medsua": r"unknown entry 'medsua' \(did you mean 'medusa'\?\)",
        "autoregressive": "autoregressive drafts nothing",
        "space": "space trains a base of its own",
        "rest": "rest drafts from what .* builds",
        f"{tmp_path}/none.py:Mine": "none.py: no such file",
        f"{tmp_path}/mine.py:Mine": "mine.py: holds no method 'Mine'",
        f"{tmp_path}/broken.py:Mine": "broken.py: cannot be run",
        f"{tmp_path}/ppd.py:Other": "there is a method 'ppd' already",
    }.items():
        with pytest.raises(UserError, match=message):
            find_entry(word)
    with pytest.raises(UserError, match="--name 'a/b': give the name of a file, without folders"):
        enter_one(Enter("suffix", name="a/b", output=str(tmp_path), docs=str(tmp_path)))
    assert find_entry("draft_model").method.layers == (0, 1, 29)


def test_a_row_is_of_one_entry(tmp_path):
    file = tmp_path / "mine.json"
    Row(file, {"name": "mine", "terms": {"updates": 5}}).stage(lambda: 1.5, "rates", "0.1")
    again = Row(file, {"name": "mine", "terms": {"updates": 5}})
    assert again.stage(lambda: pytest.fail("it is done"), "rates", "0.1") == 1.5
    with pytest.raises(UserError, match=r"mine.json is of another entry \(terms.updates 5, not 6\)"):
        Row(file, {"name": "mine", "terms": {"updates": 6}})


@pytest.mark.parametrize("method", [Medusa(heads=3), PPD(), PPD(ensemble=2), BiTA(), HiddenTransfer(), Suffix()])
def test_drafts_have_the_nodes_that_are_asked_for(method):
    sources = [Source(method, {})]
    assert all(nodes_of(rows_of(nodes, sources), sources) == nodes for nodes in NODES)


def test_the_same_tree_is_as_deep_as_the_method():
    assert len(same_tree(Medusa(heads=4))) == 15
    assert max(map(len, same_tree(Medusa(heads=1)))) == 1


def test_accuracies_of_independent_candidates_count_everywhere():
    """Best, second, none; then at distance 2 the same way. Two positions know no token at distance 2."""
    tokens = np.array([[[1, 9], [2, 9]], [[9, 2], [9, 3]], [[8, 9], [8, 9]]])
    offer = Offer(tokens, np.ones_like(tokens, bool), np.log(np.tile([0.6, 0.3], (3, 2, 1))))
    found = accuracy([Recording(np.array([0, 1, 2, 3]), [offer])], 0)
    np.testing.assert_allclose(found[:, :2], [[1 / 3, 1 / 3], [1 / 2, 1 / 2]])


def test_accuracies_of_a_trie_count_behind_what_is_right():
    tokens = np.array([[[1, 7], [5, 2]], [[6, 4], [3, 3]]])
    parent = np.array([[[0, 0], [1, 0]], [[0, 0], [0, 0]]])
    offer = Offer(tokens, np.ones_like(tokens, bool), np.log([[[0.5, 0.4], [0.9, 0.2]]] * 2), parent)
    found = accuracy([Recording(np.array([0, 1, 2]), [offer])], 0)
    np.testing.assert_allclose(found[:, :2], [[1 / 2, 0], [1, 0]])  # 5 stands below 7, which is wrong


def row_of(name, tokens, **terms):
    """A row by hand."""
    figure = {"tokens_per_step": tokens, "interval": [None, None], "rows": 4}
    by_nodes = {str(nodes): figure for nodes in NODES}
    scores = {"accuracy": [[0.5] + [0.0] * 9], "alone": by_nodes, "same": figure, "own": figure}
    terms = {"prompts": prompts_digest(), "fingerprint": "a base", "multiple": 1.0} | terms
    return {"name": name, "terms": terms, "scores": scores}


def test_the_page_ranks_rows(tmp_path):
    for row in (row_of("one", 1.5), row_of("two", 2.5), {"name": "unfinished", "terms": {}}):
        (tmp_path / f"{row['name']}.json").write_text(json.dumps(row))
    assert [row["name"] for row in read_rows(tmp_path)] == ["two", "one"]
    page = write_page(tmp_path, tmp_path).read_text()
    assert "| 1 | `two` | 2.50 | 2.50 | 2.50 |  |  |  |" in page and "unfinished" not in page
    assert "Nobody" not in page and "## Training" not in page and "Enter a method" in page
    (tmp_path / "three.json").write_text(json.dumps(row_of("three", 1.5, prompts="others")))
    with pytest.raises(UserError, match=r"three.json: prompts 'others', not '.*', do not compare"):
        read_rows(tmp_path)


def test_the_page_without_rows_says_how_to_enter(tmp_path):
    page = write_page(tmp_path, tmp_path).read_text()
    assert "Nobody has entered yet" in page and "| --- |" not in page and "leaderboard enter" in page


def test_the_page_that_ships_is_made_from_its_rows(tmp_path):
    assert write_page(Path("docs/leaderboard"), tmp_path).read_text() == Path("docs/leaderboard.md").read_text()


def test_the_command_reports(tmp_path, capsys):
    experiments.leaderboard.main(["report", "--docs", str(tmp_path)])
    assert f"written to {tmp_path}/leaderboard.md" in capsys.readouterr().out

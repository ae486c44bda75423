"""Small studies and their trainings, and benchmarks by hand."""

from pathlib import Path
from typing import Any

from experiments.studies import Training, study
from jaxspec.bench.metrics import figures
from jaxspec.bench.results import ALL, Results
from jaxspec.bench.runs import REFERENCE
from jaxspec.config import DataConfig, TrainConfig
from jaxspec.drafters import METHODS
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from tests.helpers.files import write_jsonl

RATE = {"learning_rate": 1e-2}
SMALL = (  # two tables that share a training
    study("entry", "Late entry", "a paper", {"0": Training(PPD(), RATE)}, axis="layer"),
    study(
        "rates", "Rates", "a paper",
        {"the same": Training(PPD(), RATE), "lower": Training(PPD(), {"learning_rate": 2e-3})},
    ),
)  # fmt: skip


def small_run(folder: Path) -> RunConfig:
    """What small trainings share: four updates, on answers to prompts that are written into a folder."""
    prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": f"question {i}"} for i in range(12)])
    data = DataConfig(
        prompts=prompts, answers=8, held_out=3, max_prompt_tokens=16, max_answer_tokens=24,
        held_out_tokens=24, batch_size=4, cache=str(folder / "cache"),
    )  # fmt: skip
    train = TrainConfig(steps=4, batch_size=2, sequence_length=40, insertions=8, save_every=2, eval_every=0)
    return RunConfig(model="tiny-text", method=PPD(), data=data, train=train)


def answer(number: int, seconds: float, lengths: list[int], category: str) -> dict[str, Any]:
    """An answer of one turn, whose steps made so many tokens each, and prefill one."""
    made = {"new_tokens": [sum(lengths) + 1], "decoding_steps": [len(lengths)], "accept_lengths": lengths}
    times = {"decode_seconds": [seconds], "wall_time": [seconds + 1]}
    drafts = {"offered": [[0]], "accepted": [[0]], "divergence": [None]}
    question = {"data": "f", "question_id": number, "category": category, "batch": [["f", number]]}
    return question | {"choices": [made | times | drafts]}


def benchmark(ways: dict[str, tuple], category: str = "qa", accuracies: dict | None = None, **settings: Any) -> Results:
    """A benchmark of {way: (seconds of every question, lengths of its steps)}."""
    rows = {
        way: [[answer(number, each, lengths, category) for number, each in enumerate(seconds)]]
        for way, (seconds, lengths) in ways.items()
    }
    found = {way: {ALL: figures(rows[way], rows[REFERENCE])} for way in ways}
    named = {way: {"accuracy": (accuracies or {}).get(way, [])} for way in ways}
    named |= {way: named[way] | {"adapter": "a digest"} for way in ways if way in METHODS and way != REFERENCE}
    setting = {"fingerprint": "a base", "dtype": "float32", "device": "a machine", "code": "this", "began": "today"}
    setting |= {"questions": len(rows[REFERENCE][0]), "ways": named}
    setting |= {"settings": {"limit": 0, "runs": [], "repeats": 1} | settings}
    return Results(setting, rows, found, {}, {}, {})

"""Peers: what their passes emitted, and that they answer with the same weights."""

import dataclasses
import importlib.util

import pytest

from jaxspec.bench.answers import accept_lengths
from jaxspec.bench.config import BenchConfig, check_bench
from jaxspec.bench.peers import load_peers, seconds, tokens_by_pass
from jaxspec.bench.report import write_bench_report
from jaxspec.config import SamplingConfig
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.weights.load import save_model
from tests.helpers.bench import config_of, run
from tests.helpers.tiny import make_tiny


@pytest.mark.parametrize(
    ("held", "length", "emitted"),
    [
        ([0, 7, 8, 9], 4, [1, 1, 1]),
        ([0, 7, 10, 11], 6, [3, 1, 1]),  # the second pass kept two candidates
        ([0, 9, 10], 5, [2, 1, 1]),  # prefill verified two candidates: a pass of its own
        ([0], 1, []),
    ],
)
def test_tokens_by_pass(held, length, emitted):
    assert tokens_by_pass(held, 7, length) == emitted


def test_seconds_of_a_first_pass_that_also_verified():
    assert seconds([0.0, 2.0, 2.5, 3.0, 3.1], shared=False) == pytest.approx((2.0, 1.1))
    assert seconds([0.0, 2.0, 2.5, 3.0, 3.1], shared=True) == pytest.approx((1.5, 1.6))
    assert seconds([0.0, 2.0, 2.0], shared=True) == pytest.approx((0.0, 2.0))


def test_settings_that_peers_cannot_have_are_refused(monkeypatch):
    with pytest.raises(UserError, match="batch-size must be 1, got 4"):
        check_bench(BenchConfig(data="x", peers=True, batch_size=4))
    with pytest.raises(UserError, match="--assistant needs --peers"):
        check_bench(BenchConfig(data="x", assistant="y"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torch"):
        load_peers(None)


@pytest.mark.slow
def test_peers_say_the_same_in_as_many_passes_as_they_say(model, tmp_path):
    save_model(model, tmp_path / "assistant")
    prompts = [model.encode("question 1"), model.encode("again and again and again")]
    plain = [a.tokens for a in generate(autoregressive(model), prompts, 20)]
    peers = load_peers(model, str(tmp_path / "assistant"))
    assert set(peers) == {"hf_greedy", "hf_prompt_lookup", "hf_assisted"}
    for name, peer in peers.items():
        answers = peer(prompts, 20, SamplingConfig(), 0)
        assert [a.tokens for a in answers] == plain
        for answer in answers:
            assert len(answer.drafted) == answer.new_tokens
            assert answer.decode_seconds > 0 and answer.prefill_seconds >= 0
            assert len(accept_lengths(answer)) == answer.steps and sum(accept_lengths(answer)) == answer.new_tokens - 1
            assert (answer.tokens_per_step == 1) == (name == "hf_greedy") or name == "hf_prompt_lookup"
        drawn = [peer(prompts, 8, SamplingConfig(1.0, top_k=9), seed)[0].tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
    other = make_tiny(dataclasses.replace(model.config, vocab_size=64))
    save_model(dataclasses.replace(other, tokenizer=model.tokenizer), tmp_path / "other")
    with pytest.raises(UserError, match="has another vocabulary: 64 tokens"):
        load_peers(model, str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"nowhere: transformers cannot load it"):
        load_peers(model, str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_peers_in_a_benchmark(files, model, tmp_path):
    results = run(config_of(files, "autoregressive", peers=True, limit=1), model, tmp_path)
    assert set(results.figures) == {"autoregressive", "hf_greedy", "hf_prompt_lookup"}
    assert results.figures["hf_greedy"]["all"].tokens_per_step == 1
    assert all(groups["all"].identical == groups["all"].answers > 0 for groups in results.figures.values())
    report = write_bench_report(results, tmp_path).read_text()
    assert "The peers (hf) are transformers " in report and "Nowhere: all" in report

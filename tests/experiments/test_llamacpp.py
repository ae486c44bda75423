"""llama.cpp beside jaxspec, with a stand-in for the former."""

import sys
from types import ModuleType

import pytest

from experiments import llamacpp
from experiments.llamacpp import Answer, Options, answer_of, measure, report, ways_of_jaxspec, ways_of_llamacpp
from jaxspec.errors import UserError
from tests.helpers.tiny import make_text_model


class Llama:
    """Counts from the last token of a prompt."""

    def __init__(self, path, draft_model=None, **settings):
        self.drafts = draft_model is not None

    def generate(self, tokens, temp, repeat_penalty):
        assert (temp, repeat_penalty) == (0.0, 1.0)
        yield from range(tokens[-1] + 1, 10**6, 2 if self.drafts else 1)


@pytest.fixture
def installed(monkeypatch):
    package, drafting = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama, drafting.LlamaPromptLookupDecoding = Llama, lambda num_pred_tokens: num_pred_tokens
    for module in (package, drafting):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(llamacpp, "embedded_model_path", lambda: "model.gguf")


def test_an_answer_ends_at_the_end_of_the_text_or_where_it_must():
    assert answer_of(iter([4, 5, 6, 7]), 3, [9]).tokens == [4, 5, 6]
    assert answer_of(iter([4, 9, 6, 7]), 3, [9]).tokens == [4, 9]
    assert Answer([1, 2, 3], 0.5).rate == 4 and Answer([1], 0.0).rate == 0


def test_all_answer_the_same_prompts(installed):
    model, options = make_text_model(num_layers=1), Options("", methods=("suffix",), tokens=6, drafted=(2,))
    ways = ways_of_llamacpp(options, model, 64) | ways_of_jaxspec(options, model)
    answers = measure(ways, [[1, 2, 3], [4, 5]])
    assert [answer.tokens for answer in answers["llama.cpp"]] == [[4, 5, 6, 7, 8, 9], [6, 7, 8, 9, 10, 11]]
    assert answers["jaxspec, suffix"][0].tokens == answers["jaxspec, autoregressive"][0].tokens
    lines = report(answers)
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| llama.cpp",
        "| llama.cpp, prompt lookup of 2",
        "| jaxspec, autoregressive",
        "| jaxspec, suffix",
    ]
    assert lines[3].endswith("| 0 of 2 |") and lines[5].endswith("| 2 of 2 |")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-binary llama-cpp-python"):
        ways_of_llamacpp(Options(""), make_text_model(num_layers=1), 64)

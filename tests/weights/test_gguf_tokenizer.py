"""Metadata of tokenizers that make no sense are one line each."""

import pytest

from jaxspec.errors import UserError
from jaxspec.weights.gguf_tokenizer import build_tokenizer
from tests.helpers.model import MERGES, TOKENS, TYPES

METADATA = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": TYPES, "merges": MERGES}


def build(**changes):
    content = {f"tokenizer.ggml.{name}": value for name, value in (METADATA | changes).items()}
    return build_tokenizer(content.get, "a.gguf")


def test_these_make_sense():
    assert len(build()) == len(TOKENS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 5}, "tokens must be a list of texts, got 5"),
        ({"tokens": [1, 2]}, r"tokens must be a list of texts, got \[1, 2\]"),
        ({"merges": "x"}, "merges must be a list of texts, got 'x'"),
        ({"merges": ["x"]}, "merges do not fit its tokens"),
        ({"merges": ["nowhere nothing"]}, "merges do not fit its tokens"),
        ({"model": ["gpt2"]}, r"tokenizer model \['gpt2'\] is not supported"),
        ({"pre": ["smollm"]}, r"pre-tokenizer \['smollm'\] is not supported"),
        ({"token_type": 3}, "token_type must be a list of numbers, got 3"),
        ({"eos_token_id": "2"}, r"special token '2' \(eos\) is outside the vocabulary"),
        ({"eot_token_id": 10**6}, r"special token 1000000 \(eot\) is outside the vocabulary"),
        ({"eom_token_id": -1}, r"special token -1 \(eom\) is outside the vocabulary"),
        ({"model": "llama", "unknown_token_id": 10**6}, r"special token 1000000 \(unknown\) is outside the vocabulary"),
    ],
)
def test_what_makes_no_sense_is_named(changes, message):
    with pytest.raises(UserError, match=f"a.gguf: .*{message}"):
        build(**changes)

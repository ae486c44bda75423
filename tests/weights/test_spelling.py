"""The bytes of single tokens."""

import pytest

from jaxspec.weights.spelling import Spelling, readable
from tests.helpers.tiny import make_sentencepiece_tokenizer, make_tokenizer


@pytest.mark.parametrize("make", [make_tokenizer, make_sentencepiece_tokenizer])
def test_bytes_of_tokens_are_those_of_the_text(make):
    """Also where a character takes several tokens."""
    tokenizer = make()
    spelling = Spelling(tokenizer)
    ids = tokenizer.encode("hello 😊東京 é", add_special_tokens=False)
    assert len(ids) > 14
    first, *rest = ids
    shown = spelling.shown(first, True) + b"".join(map(spelling.bytes, rest))
    assert shown.decode() == "hello 😊東京 é"


def test_special_tokens_have_their_own_text():
    tokenizer = make_sentencepiece_tokenizer()
    spelling = Spelling(tokenizer)
    assert spelling.bytes(tokenizer.bos_token_id) == b"<s>" and tokenizer.bos_token_id in spelling.special
    assert spelling.bytes(99_999) == b""  # rows of a padded vocabulary have no token


def test_parts_of_characters_are_written_as_bytes():
    smile = "😊".encode()
    assert readable(smile) == "😊"
    assert readable(smile[:2]) == r"bytes:\xf0\x9f"

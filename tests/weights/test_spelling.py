"""The bytes of single tokens."""

import dataclasses

import pytest
from tokenizers import AddedToken

from jaxspec.weights.spelling import Spelling, readable
from tests.helpers.tiny import make_sentencepiece_tokenizer, make_text_model, make_tokenizer


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


def test_tokens_are_special_as_the_text_leaves_them_out():
    """Tokenizers that were published with headers of turns name only some of these as special."""
    tokenizer = make_sentencepiece_tokenizer()
    tokenizer.add_tokens([AddedToken("<head>", special=True), AddedToken("<plain>", special=False)])
    head, plain = tokenizer.convert_tokens_to_ids(["<head>", "<plain>"])
    special = Spelling(tokenizer).special
    assert head in special and plain not in special
    assert tokenizer.decode([head, plain], skip_special_tokens=True) == "<plain>"


@pytest.mark.parametrize("make", [make_tokenizer, make_sentencepiece_tokenizer])
def test_bytes_that_are_no_character_leave_the_others_whole(make):
    """An answer may end within a character, or a base draw a byte that does not belong there."""
    tokenizer = make()
    model = dataclasses.replace(make_text_model(), tokenizer=tokenizer)
    ids = tokenizer.encode("a 東😊 é b", add_special_tokens=False)
    broken = len(tokenizer.encode("a 東😊", add_special_tokens=False)) - 1
    texts = [model.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert texts[-1] == "a 東😊 é b" and texts[broken] == "a 東\ufffd"
    assert all(texts[-1].startswith(text.rstrip("\ufffd")) for text in texts)
    assert model.decode(ids[:broken] + ids[broken + 1 :]) == "a 東\ufffd é b"

"""Text while it comes: halves are held back, and a stop text ends it at the same token however many come at once."""

import itertools
import time

import pytest

from jaxspec.generation.text import TextStream


def decode(tokens):
    """A token per byte."""
    return bytes(tokens).decode(errors="replace")


def decode_words(tokens):
    """Tokens of whole words, whose leading space is lost at the beginning, and without the special one, 0."""
    return "".join(f" {word}" for word in tokens if word).removeprefix(" ")


def stream(text, size, stop=()):
    """The pieces of a text whose bytes come `size` at a time, and what ended it."""
    tokens, made, pieces = list(text.encode()), TextStream(decode, stop), []
    for first in range(0, len(tokens), size):
        pieces.append(made.add(tokens[first : first + size], first + size >= len(tokens)))
        if made.stopped is not None:
            break
    return pieces, made


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_characters_come_whole(size):
    pieces, made = stream("a€ü🙂b", size)
    assert "".join(pieces) == made.sent == "a€ü🙂b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown():
    made = TextStream(decode)
    assert made.add([97, 0xE2], final=False) == "a"
    assert made.add([0x82], final=True) == "\ufffd"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stop", "shown", "found", "count"),
    [
        (["lo"], "hel", "lo", 5),
        (["lo w", "o"], "hell", "o", 5),  # the one that is whole first, even where a longer one comes with it
        (["hello"], "", "hello", 5),
        (["xyz", "rld"], "hello wo", "rld", 11),
        (["worm"], "hello world", None, 11),
    ],
)
def test_a_stop_text_ends_it(size, stop, shown, found, count):
    pieces, made = stream("hello world", size, stop)
    assert ("".join(pieces), made.stopped, len(made.tokens)) == (shown, found, count)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("least", "shown", "found"),
    [(0, "he", "l"), (2, "he", "l"), (3, "hel", "l"), (4, "hello wor", "l"), (10, "hello world", None)],
)
def test_no_stop_text_begins_in_the_first_tokens(size, least, shown, found):
    tokens, made = list(b"hello world"), TextStream(decode, ["l"], least)
    for first in range(0, len(tokens), size):
        made.add(tokens[first : first + size], first + size >= len(tokens))
        if made.stopped is not None:
            break
    assert (made.sent, made.stopped) == (shown, found)


def test_what_may_start_a_stop_text_waits():
    pieces, _ = stream("ab<en", 1, ["<end>"])
    assert pieces == ["a", "b", "", "", "<en"]
    grown = list(itertools.accumulate(stream("a<e b", 1, ["<end>"])[0]))
    assert grown == ["a", "a", "a", "a<e ", "a<e b"]


def test_a_long_stop_text_takes_no_time():
    """It comes from anybody, and is looked for between the steps of all requests."""
    made = TextStream(decode, ["a" * 1_000_000])
    began = time.perf_counter()
    assert made.add(list(b"b" + 500 * b"a"), final=False) == "b"
    assert made.add(list(b"c"), final=False) == 500 * "a" + "c"
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_a_decoder_makes_of_the_beginning_is_made_of_the_beginning_alone(size):
    tokens = [0, "once", 0, "upon", "a", 0, 0, "time"]
    made = TextStream(decode_words)
    for first in range(0, len(tokens), size):
        made.add(tokens[first : first + size], final=False)
    assert made.sent == "once upon a time"


def test_long_texts_are_not_decoded_again_and_again():
    lengths = []

    def counted(tokens):
        lengths.append(len(tokens))
        return decode(tokens)

    made = TextStream(counted, ["never"])
    for _ in range(100):
        made.add(list(b"abcd"), final=False)
    assert made.sent == "abcd" * 100 and max(lengths) <= 8

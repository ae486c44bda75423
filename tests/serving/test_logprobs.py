"""Texts and offsets of tokens beside their log-probabilities."""

import dataclasses

import pytest
from tokenizers import pre_tokenizers

from jaxspec.serving.api import make_app
from jaxspec.serving.engine import Engine
from jaxspec.serving.logprobs import TokenTexts
from jaxspec.serving.request import TokenScore
from jaxspec.weights.spelling import Spelling
from tests.helpers.serving import LIMITS, post
from tests.helpers.tiny import make_sentencepiece_tokenizer, make_tokenizer


def told(texts, ids, best=(), count=5):
    """The lists of some tokens."""
    return texts.lists(ids, [TokenScore(-1.0, list(best))] * len(ids), count)


def test_bytes_of_a_chat_are_those_of_each_token():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("é😊東")
    entries = TokenTexts(Spelling(tokenizer)).chat(ids, [TokenScore(-1.0, [(ids[0], -1.0)])] * len(ids), 1)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é😊東"
    assert entries[0]["token"] == r"bytes:\xc3" and entries[0]["top_logprobs"][0]["bytes"] == [0xC3]


def test_offsets_are_characters_of_the_text():
    """A token that is part of a character begins where the character does."""
    tokenizer = make_tokenizer()
    text = "aé😊b"
    made = told(TokenTexts(Spelling(tokenizer), text), tokenizer.encode(text))
    assert made["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_tokens_behind_half_a_character_are_not_part_of_it():
    tokenizer = make_tokenizer()
    one, two, three, four = tokenizer.encode("😊")
    a = tokenizer.encode("a")[0]
    made = told(TokenTexts(Spelling(tokenizer)), [a, one, a, one, two, one, two, three, four, two, a])
    assert tokenizer.decode([a, one, a, one, two, one, two, three, four, two, a]) == "a\ufffda\ufffd😊\ufffda"
    assert made["text_offset"] == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6]


@pytest.mark.parametrize("prompt", ["hello world", "<s>hello world"])
def test_a_beginning_token_takes_no_place_unless_it_is_in_the_text(prompt):
    tokenizer = make_sentencepiece_tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=prompt[0] != "<")
    texts = TokenTexts(Spelling(tokenizer), prompt)
    made = told(texts, ids)
    assert made["tokens"][0] == "<s>" and "".join(made["tokens"][1:]) == "hello world"
    for token, offset in zip(made["tokens"][1:], made["text_offset"][1:], strict=True):
        assert prompt[offset:].startswith(token)
    texts.end_prompt()
    assert told(texts, tokenizer.convert_tokens_to_ids(["▁a", "b"])) | {"token_logprobs": 0, "top_logprobs": 0} == {
        "tokens": [" a", "b"],
        "text_offset": [len(prompt), len(prompt) + 2],
        "token_logprobs": 0,
        "top_logprobs": 0,
    }


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("prompt", ["hello world", " hello  b", "   1", "hello</s>b </s> c", "  "])
def test_spaces_of_a_prompt_are_its_own(prompt, always):
    """Tokenizers add a space to every beginning, or to those that have none; a text may also consist of spaces."""
    tokenizer = make_sentencepiece_tokenizer()
    if not always:
        tokenizer.backend_tokenizer.normalizer = None
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    made = told(TokenTexts(Spelling(tokenizer), prompt), ids)
    assert "".join(made["tokens"]) == prompt
    assert all(prompt[at:].startswith(t) for t, at in zip(made["tokens"], made["text_offset"], strict=True))


def test_as_many_alternatives_as_asked_whatever_their_text():
    """At the start of a text the space of a piece is left out, so that two of them read alike."""
    tokenizer = make_sentencepiece_tokenizer()
    names = ["▁a", "a", "<0xF0>", "<0x9F>", "</s>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    best = [(token, -float(i)) for i, token in enumerate(ids, 1)]
    [found] = told(TokenTexts(Spelling(tokenizer)), ids[1:2], best)["top_logprobs"]
    assert found == {"a": -1.0, f"token_id:{ids[0]}": -1.0, r"bytes:\xf0": -3.0, r"bytes:\x9f": -4.0, "</s>": -5.0}


def test_tokens_join_to_the_text_of_a_completion(engine):
    """Of a base with sentencepiece, with the space between a prompt, echoed or not, and its answer."""
    tokenizer = make_sentencepiece_tokenizer()
    model = dataclasses.replace(engine.model, tokenizer=tokenizer)
    drafter = dataclasses.replace(engine.drafter, model=model)

    with Engine(model, drafter, LIMITS) as other:
        app, begins = make_app(other, "tiny"), ""
        for seed in range(12):
            body = {"prompt": "hello there", "max_tokens": 8, "seed": seed, "logprobs": 5}
            answers = (post(app, "/v1/completions", body | {"echo": echo}).json() for echo in (False, True))
            plain, echoed = (answer["choices"][0] for answer in answers)
            for choice in (plain, echoed):
                lists = choice["logprobs"]
                joined = "".join(t for t in lists["tokens"] if t not in ("<s>", "</s>", "<unk>"))
                if "bytes:" not in joined:
                    assert joined == choice["text"]
                assert all(len(best) >= 5 for best in lists["top_logprobs"] if best)
                for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
                    if token[:1] != "<" and "bytes:" not in joined:
                        assert choice["text"][offset:].startswith(token)
            assert echoed["text"] == "hello there" + plain["text"]
            begins += plain["text"][:1]
            assert echoed["logprobs"]["text_offset"][:2] == [0, 0]
        assert " " in begins

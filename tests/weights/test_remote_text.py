"""Tokenizers that were published with code of their own, from their files: against sentencepiece, and by hand."""

import base64
import itertools
import json
import sys

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from jaxspec.errors import UserError
from jaxspec.weights.load import load_model
from jaxspec.weights.pieces import Pieces, read_tiktoken
from jaxspec.weights.remote_text import remote_tokenizer
from jaxspec.weights.templates import TEMPLATES, own_template, turn_end
from tests.helpers.remote_families import write
from tests.helpers.tiny import make_tokenizer

TEXTS = ["hello world", "hello  yellow   fellow", " hello\n\tworld ", "Grüße 東京 😊", "x<|im_end|>y", "", "12345"]
WORDS = "hello world, hello yellow fellow, world wide web, lower and slower words\n" * 30
CLASSES = {"internlm": "InternLMTokenizer", "chatglm": "ChatGLMTokenizer"}


def train(folder, **settings):
    """A tokenizer.model of 300 pieces."""
    (folder / "text").write_text(WORDS)
    usual = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "minloglevel": 2}
    usual |= {"hard_vocab_limit": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    SentencePieceTrainer.train(input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), **usual | settings)
    return folder / "tokenizer.model"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram"},
        {"user_defined_symbols": ["low", "123"], "add_dummy_prefix": False},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())) or "as LLaMA",
)
def test_pieces_are_those_of_sentencepiece(settings, tmp_path):
    file = train(tmp_path, **settings)
    judge, ours = SentencePieceProcessor(model_file=str(file)), Pieces.read(file).tokenizer()
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == judge.encode(text), text
        assert ours.decode(judge.encode(text)) == judge.decode(judge.encode(text))


def made(folder, kind, **settings):
    """Our tokenizer of a published class, and sentencepiece's of the same file."""
    train(folder, **settings)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": CLASSES[kind]}))
    return remote_tokenizer(folder), SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_internlm_begins_with_its_token_and_knows_its_ends_of_turns(tmp_path):
    tokenizer, judge = made(tmp_path, "internlm", control_symbols=["<eoh>", "<eoa>"])
    assert tokenizer.encode("hello") == [1, *judge.encode("hello")]
    ends = [judge.piece_to_id(token) for token in ("<eoh>", "<eoa>")]
    ids = tokenizer.encode("hello<eoh>world<eoa>", add_special_tokens=False)
    assert ids == [*judge.encode("hello"), ends[0], *judge.encode("world"), ends[1]]
    assert turn_end(tokenizer, TEMPLATES["internlm"]) == ends[1]
    assert tokenizer.eos_token_id == 2


def test_internlm2_puts_its_tokens_in_the_place_of_pieces(tmp_path):
    unused = ["[UNUSED_TOKEN_0]", "[UNUSED_TOKEN_1]"]
    judge = SentencePieceProcessor(model_file=str(train(tmp_path, user_defined_symbols=unused)))
    added = {
        str(judge.piece_to_id(piece)): {"content": token, "special": True}
        for piece, token in zip(unused, ["<|im_start|>", "<|im_end|>"], strict=True)
    }
    content = {"tokenizer_class": "InternLM2Tokenizer", "chat_template": TEMPLATES["internlm2"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content | {"added_tokens_decoder": added}))
    tokenizer = remote_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [judge.piece_to_id(unused[1])]
    assert turn_end(tokenizer, tokenizer.chat_template) == judge.piece_to_id(unused[1])
    assert len(tokenizer) == judge.vocab_size()


def test_a_chat_template_of_its_own_is_taken_from_either_file(tmp_path):
    made(tmp_path, "chatglm")
    file = tmp_path / "tokenizer_config.json"
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    file.write_text(json.dumps({"tokenizer_class": "ChatGLMTokenizer", "chat_template": several}))
    assert own_template(remote_tokenizer(tmp_path)) == "one"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert own_template(remote_tokenizer(tmp_path)) == "three"


def test_chatglm3_counts_its_tokens_behind_the_pieces(tmp_path):
    tokenizer, judge = made(tmp_path, "chatglm")
    count = judge.vocab_size()
    assert tokenizer.encode("hello") == [count + 1, count + 3, *judge.encode("hello")]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}],
        chat_template=TEMPLATES["chatglm3"],
        add_generation_prompt=True,
        return_dict=False,
    )
    # as its own code writes a turn: the role, a line, the message, each encoded for itself
    assert ids == [count + 1, count + 3, count + 6, *judge.encode("\n"), *judge.encode("hello"), count + 7]
    assert turn_end(tokenizer, TEMPLATES["chatglm3"]) == count + 6


def test_a_text_of_chatglm3_begins_once(tmp_path):
    write(tmp_path, "chatglm")
    made(tmp_path, "chatglm")
    model = load_model(str(tmp_path), template="chatglm3")
    assert model.encode("[gMASK]sophello", chat=False) == model.encode("hello", chat=False)
    assert model.encode("hello")[:2] == model.encode("hello", chat=False)[:2] != model.encode("hello")[2:4]
    assert len(model.eos) == 2  # </s>, and the token that begins the user's next turn


def tiktoken_file(folder, merges=(b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", "é".encode())):
    tokens = [*(bytes([i]) for i in range(256)), *merges]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "qwen.tiktoken").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "QWenTokenizer"}))
    return tokens


def by_rank(ranks, piece):
    """tiktoken's rule, by hand: the pair of the lowest rank is merged, the leftmost of several, until there is none."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        i = min(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_qwen_merges_bytes_by_rank(tmp_path):
    tokens = tiktoken_file(tmp_path)
    tokenizer, ranks = remote_tokenizer(tmp_path), {token: rank for rank, token in enumerate(tokens)}
    assert read_tiktoken(tmp_path / "qwen.tiktoken") == ranks
    pieces = ["hello", " world", " ", "1", "2", "!\n", "東京", " shell"]  # as its pattern splits the text
    assert tokenizer.encode("".join(pieces)) == [i for piece in pieces for i in by_rank(ranks, piece.encode())]
    assert tokenizer.encode("e\u0301") == [ranks["é".encode()]]  # composed first
    assert tokenizer.decode(tokenizer.encode("hello wörld 😊")) == "hello wörld 😊"
    ids = tokenizer.encode("<|im_start|>hello<|im_end|><|endoftext|><|extra_204|>")
    n = len(tokens)
    assert ids == [n + 1, ranks[b"hello"], n + 2, n, n + 207]
    assert (tokenizer.eos_token_id, turn_end(tokenizer, TEMPLATES["qwen"])) == (n, n + 2)


def test_a_base_is_loaded_with_its_text(tmp_path):
    """Weights and text of the files alone, though the config names code to run."""
    write(
        tmp_path, "internlm", vocab_size=64, auto_map={"AutoModelForCausalLM": "modeling_internlm.InternLMForCausalLM"}
    )
    (tmp_path / "modeling_internlm.py").write_text("raise SystemExit('run')")
    made(tmp_path, "internlm")
    model = load_model(str(tmp_path), template="internlm")
    assert model.decode(model.encode("hello wörld", chat=False)) == "hello wörld"
    assert model.encode("hello")[0] == 1 and model.eos == (2,)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("qwen.tiktoken", b"aGVsbG8= 0\nnot a line", "line 2 must be a token in base64 and its rank"),
        ("qwen.tiktoken", b"aGVsbG8= 7", "the ranks must be those from 0 on"),
        ("tokenizer.model", b"not a model", "is not a model of sentencepiece"),
        ("tokenizer.model", b"", "is not a model of sentencepiece"),
        ("other", b"", "tokenizer.model is missing"),
    ],
)
def test_wrong_files_are_one_line(file, content, message, tmp_path):
    (tmp_path / file).write_bytes(content)
    kind = "QWenTokenizer" if "tiktoken" in file else "ChatGLMTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(UserError, match=message) as refused:
        remote_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("added", [{"x": {}}, {"5": "text"}, [1], {"900": {"content": "far"}}])
def test_wrong_added_tokens_are_one_line(added, tmp_path):
    train(tmp_path)
    content = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="added"):
        remote_tokenizer(tmp_path)


def test_code_of_a_folder_is_not_run(tmp_path):
    """Nor is there a question whether to: a tokenizer.json is read, and a class that is not known refused by name."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    own = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization.ChatGLM4Tokenizer", None]},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "tokenization.py").write_text("raise SystemExit('run')")
    tokenizer = remote_tokenizer(tmp_path)
    assert tokenizer.encode("hello") == make_tokenizer().encode("hello")
    assert tokenizer.eos_token_id == make_tokenizer().eos_token_id
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match="tokenizer_class 'ChatGLM4Tokenizer' comes with code of its own, which is not run"
    ):
        remote_tokenizer(tmp_path)


def test_missing_sentencepiece_is_one_line(tmp_path, monkeypatch):
    file = train(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"reading it needs sentencepiece; install it with: pip install sentencepiece"):
        Pieces.read(file)

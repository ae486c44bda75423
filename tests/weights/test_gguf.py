"""GGUF files against the directories they were made from, and their tokenizers."""

import dataclasses
import functools
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import RopeScaling
from jaxspec.errors import UserError
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import load_directory, save_directory
from tests.helpers.model import (
    CONTROL,
    MERGES,
    TOKENS,
    TYPES,
    USER_DEFINED,
    add_byte_level_tokenizer,
    assert_same_params,
    random_params,
    tiny_config,
    write_gguf,
)

V = len(TOKENS)
MODELS = {
    "llama": tiny_config(vocab_size=V),
    "llama_tied_linear": tiny_config(vocab_size=V, tie_embeddings=True, rope_scaling=RopeScaling("linear", 4.0)),
    "llama3": tiny_config(vocab_size=V, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 8192)),
    "qwen2": tiny_config(vocab_size=V, tie_embeddings=True, qkv_bias=True, rope_theta=1e6),
    "qwen3": tiny_config(vocab_size=V, head_norms=True, rope_theta=1e6),
}


def written(folder, config=MODELS["llama"], **options):
    return write_gguf(folder / "llama.gguf", config, random_params(config), **options)


def opened(folder, config=MODELS["llama"], **options):
    return GGUFFile(written(folder, config, **options))


def tokenizer(folder, **options):
    return opened(folder, **options).tokenizer()


@pytest.fixture
def llama(tmp_path):
    return written(tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_file_and_directory_give_the_same_base(model, tmp_path):
    config = MODELS[model]
    save_directory(tmp_path, config, random_params(config))
    expected, expected_params, expected_fingerprint = load_directory(tmp_path, jnp.float32)
    loaded, loaded_params, fingerprint = opened(tmp_path, config).load(jnp.float32)
    assert loaded.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert dataclasses.replace(loaded, rms_norm_eps=expected.rms_norm_eps) == expected
    assert_same_params(loaded_params, expected_params)
    assert fingerprint == expected_fingerprint


def test_linear_scaling_has_one_fingerprint_whatever_the_directory_says_of_the_original_context(tmp_path):
    """Published directories do not say, GGUF files cannot, and nothing depends on it."""
    config = MODELS["llama_tied_linear"]
    save_directory(tmp_path, config, random_params(config))
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content["rope_parameters"].pop("original_max_position_embeddings", None)
    file.write_text(json.dumps(content))
    assert load_directory(tmp_path, jnp.float32)[-1] == opened(tmp_path, config).load(jnp.float32)[-1]


def test_bfloat16_weights_are_close(tmp_path):
    config = MODELS["qwen2"]
    _, half, _ = opened(tmp_path, config, quantization=gguf.GGMLQuantizationType.BF16).load(jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), half, random_params(config))


def test_8_bit_blocks_are_close(tmp_path):
    config = tiny_config(vocab_size=V, intermediate_size=64, tie_embeddings=True)
    _, loaded, _ = opened(tmp_path, config, quantization=gguf.GGMLQuantizationType.Q8_0).load(jnp.float32)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=float(jnp.abs(b).max()) / 127)

    jax.tree.map(close, loaded, random_params(config))


def test_sliding_window_is_read(tmp_path):
    assert opened(tmp_path, dataclasses.replace(MODELS["llama"], sliding_window=6)).config().sliding_window == 6


def test_rope_divisors_that_are_not_llama3s_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.helpers.model.llama3_divisors", lambda _: np.linspace(1, 8, 8).astype(np.float32))
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        opened(tmp_path, MODELS["llama3"]).config()


@pytest.mark.parametrize(
    ("keys", "factor"),
    [({"scale_linear": 4.0}, 4.0), ({"scaling__factor": 2.0}, 2.0), ({"scaling__type": "linear"}, None),
     ({"scaling__type": "none", "scaling__factor": 2.0}, None), ({"scale_linear": 1.0}, None)],
)  # fmt: skip
def test_rope_scaling_of_older_files(keys, factor, tmp_path):
    """A key of their own, or none for the kind, which then is linear."""
    options = {f"llama__rope__{key}": value for key, value in keys.items()}
    assert opened(tmp_path, **options).config().rope_scaling == (factor and RopeScaling("linear", factor))


def test_unknown_rope_scaling_is_named(tmp_path):
    with pytest.raises(UserError, match="rope scaling 'yarn' is not supported"):
        opened(tmp_path, llama__rope__scaling__type="yarn").config()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.05, 0.2, 0.5, 0.99])
def test_truncated_file_is_named(part, llama):
    content = llama.read_bytes()
    llama.write_bytes(content[: int(part * len(content))])
    with pytest.raises(UserError, match=r"llama\.gguf: not a complete GGUF file"):
        GGUFFile(llama)


def test_other_file_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model at all " * 10)
    with pytest.raises(UserError, match="not a complete GGUF file"):
        GGUFFile(tmp_path / "x.gguf")


def test_other_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="architecture 'gpt2' is not supported"):
        GGUFFile(tmp_path / "g.gguf")


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"])
def test_missing_metadata_is_named(key, llama):
    """The key is overwritten with one of equal length that nobody reads."""
    content = llama.read_bytes()
    assert content.count(key.encode()) == 1
    llama.write_bytes(content.replace(key.encode(), key[:-1].encode() + b"X"))
    with pytest.raises(UserError, match=key):
        GGUFFile(llama).config()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 0, "llama.attention.head_count must be a whole number from 1 to 10000, got 0"),
        ("embedding_length", 0, "llama.embedding_length must be a whole number from 1 to 1000000, got 0"),
        ("block_count", 10**6, "llama.block_count is 1000000, of 21 tensors"),
    ],
)
def test_impossible_counts_are_named(key, value, message, llama):
    """The value, 4 bytes, stands behind the key and its type."""
    content = llama.read_bytes()
    at = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    llama.write_bytes(content[:at] + value.to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(UserError, match=message):
        GGUFFile(llama).config()


def test_a_special_token_outside_the_vocabulary_is_named(tmp_path):
    with pytest.raises(UserError, match=rf"special token 1000000 \(unknown\) is outside the vocabulary of {V}"):
        tokenizer(tmp_path, tokenizer__ggml__unknown_token_id=10**6)


def test_types_of_other_tokens_are_named(tmp_path):
    def add(writer):
        add_byte_level_tokenizer(writer)
        writer.kv_data[0]["tokenizer.ggml.token_type"].value = TYPES[:-1]

    with pytest.raises(UserError, match=f"{V} tokens, and tokenizer.ggml.token_type is of {V - 1}"):
        tokenizer(tmp_path, tokenizer=add)


def test_missing_tensor_is_named(llama):
    llama.write_bytes(llama.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_up.weighX"))
    with pytest.raises(UserError, match=r"unknown tensor 'blk.1.ffn_up.weighX'"):
        GGUFFile(llama).load(jnp.float32)


def test_a_gguf_file_names_all_ids_that_end_a_text(tmp_path, llama):
    """The text's, a turn's, a message's."""
    assert GGUFFile(llama).eos_tokens() == (TOKENS.index(CONTROL[1]),)
    more = {"tokenizer__ggml__eot_token_id": 0, "tokenizer__ggml__eom_token_id": 3}
    assert opened(tmp_path, **more).eos_tokens() == (TOKENS.index(CONTROL[1]), 0, 3)


def test_a_head_of_its_own_is_used_whatever_it_holds(tmp_path):
    """In GGUF files nothing else says whether embeddings are tied."""
    config = dataclasses.replace(MODELS["llama"], tie_embeddings=False)
    loaded, params, _ = opened(tmp_path, config).load(jnp.float32)
    assert not loaded.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"], random_params(config)["lm_head"])


TEXTS = ["hello world", "  two  spaces\n\nand lines\t", "Grüße, 東京 🙂", "x=1234; y=12", "", "don't"]


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "refact", "llama-bpe", "dbrx", "qwen2"])
def test_byte_level_tokenizer_round_trips_text(pre, tmp_path):
    t = tokenizer(tmp_path, tokenizer=functools.partial(add_byte_level_tokenizer, pre=pre))
    for text in TEXTS:
        ids = t.encode(text, add_special_tokens=False)
        assert all(0 <= i < V for i in ids)
        assert t.decode(ids) == text
    assert t.tokenize("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    digits = {"smollm": 4, "refact": 4, "qwen2": 4, "llama-bpe": 2, "dbrx": 2}  # one by one, or in threes
    assert len(t.tokenize("1234")) == digits.get(pre, 1)
    assert len(MERGES) == 8 and t.eos_token == CONTROL[1] and t.bos_token == CONTROL[0]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    t = tokenizer(tmp_path)
    ids = t.encode(f"{CONTROL[0]}hello{USER_DEFINED}{CONTROL[1]}")
    assert ids == [TOKENS.index(x) for x in (CONTROL[0], "hello", USER_DEFINED, CONTROL[1])]
    assert t.decode(ids, skip_special_tokens=True) == f"hello{USER_DEFINED}"
    assert t.decode(ids) == f"{CONTROL[0]}hello{USER_DEFINED}{CONTROL[1]}"
    assert len(t) == V  # none was appended under a new id


def test_chat_template(tmp_path):
    t = tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    ids = t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert t.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == TOKENS.index(CONTROL[0])


@pytest.mark.parametrize("add", [True, False])
def test_encode_begins_with_bos_where_the_file_says_so(add, tmp_path):
    """As llama.cpp and the original tokenizers do; never a second one after the chat template's."""
    t = tokenizer(tmp_path, tokenizer__ggml__add_bos_token=add)
    bos, hello = TOKENS.index(CONTROL[0]), TOKENS.index("hello")
    assert t.encode("hello") == ([bos, hello] if add else [hello])
    messages = [{"role": "user", "content": "hello"}]
    assert t.apply_chat_template(messages, return_dict=False).count(bos) == 1


def test_where_the_file_does_not_say_llama_3_begins_with_bos(tmp_path):
    for pre, first in (("llama-bpe", [TOKENS.index(CONTROL[0])]), ("smollm", [])):
        t = tokenizer(tmp_path, tokenizer=functools.partial(add_byte_level_tokenizer, pre=pre))
        assert t.encode("hello") == [*first, TOKENS.index("hello")]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "h", "e", "l", "o", "▁"]
PIECES += ["he", "ll", "▁he", "llo", "hello", "▁hello"]


def add_sentencepiece_tokenizer(writer):
    """LLaMA-2's kind: unknown, control, bytes, then characters and the pieces merged from them."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def test_sentencepiece_tokenizer_round_trips_text(tmp_path):
    """Pieces for what the vocabulary knows, bytes for the rest, and the leading space taken away again."""
    t = tokenizer(tmp_path, tokenizer=add_sentencepiece_tokenizer)
    assert t.convert_ids_to_tokens(t.encode("hello hell")) == ["▁hello", "▁he", "ll"]
    assert t.convert_ids_to_tokens(t.encode("hé")) == ["▁", "h", "<0xC3>", "<0xA9>"]
    for text in ["hello hello", "hé 🙂\nhello", "x = 1"]:
        assert t.decode(t.encode(text)) == text
    ids = t.encode("<s>hello</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert t.decode(ids, skip_special_tokens=True).strip() == "hello"


@pytest.mark.parametrize(
    ("kind", "pre", "message"), [("bert", "x", "model 'bert'"), ("gpt2", "x", "pre-tokenizer 'x'")]
)
def test_unknown_tokenizer_is_named(kind, pre, message, tmp_path):
    def add(writer):
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * V)
        writer.add_token_merges(MERGES)

    with pytest.raises(UserError, match=f"{message} is not supported"):
        tokenizer(tmp_path, tokenizer=add)

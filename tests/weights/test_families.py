"""config.json of every family: strict reading, windows, rotations, and back."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError
from jaxspec.weights.families import hf_config, parse_config, published_form
from jaxspec.weights.family import UNREAD
from jaxspec.weights.family_table import FAMILIES
from jaxspec.weights.hf import load_directory, save_directory
from tests.helpers.family_examples import EXAMPLES
from tests.helpers.model import random_params, tiny_config

LLAMA = hf_config(tiny_config())
SIZES = {key: LLAMA[key] for key in LLAMA if key.endswith("size") or key.startswith("num_")}
WITHOUT_CLASS = ("mimo", "gemma3", "internlm", "internlm2", "chatglm", "qwen")
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}},
}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("family", EXAMPLES)
def test_a_config_is_written_and_read_again(family):
    written = hf_config(EXAMPLES[family])
    assert written["model_type"] == family
    assert parse_config(written) == EXAMPLES[family]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", "four"),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("head_dim", -2),
        ("rms_norm_eps", None),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("vocab_size", 1e12),
        ("hidden_size", 32.5),
        ("intermediate_size", []),
        ("num_hidden_layers", 1_000_000),
        ("num_hidden_layers", -1),
        ("max_position_embeddings", "long"),
        ("rope_parameters", "linear"),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", "relu"),
        ("hidden_act", None),
        ("model_type", ["llama"]),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("is_encoder_decoder", True),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", 1e-60),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {"a": 5}}),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 8}}}),
        ("quantization_config", COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}),
    ],
)
def test_an_impossible_value_is_one_line_that_names_the_key(key, value):
    began = time.perf_counter()
    with pytest.raises(UserError, match=rf"^where.json: .*{key}") as refused:
        parse_config(LLAMA | {key: value}, "where.json")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "key 'factor' is missing"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a positive number .*, got 'two'"),
        ({"rope_type": "proportional"}, "rope scaling 'proportional' is not supported; supported: linear, dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor must be a list of 8"),
        ({"rope_theta": 1}, "rope_theta must be a positive number from 1.001 to 1e\\+12, got 1"),
        ({"rope_type": "yarn", "factor": 0.001}, "factor must be a positive number from 1 to 1e\\+06, got 0.001"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}, "beta_fast 1 must be above beta_slow 32"),
        ({"rope_type": "yarn", "factor": 4, "mscale": "x"}, "mscale must be a positive number"),
        ({"rope_type": 0, "factor": 4}, "rope scaling 0 is not supported"),
        ({"rope_type": "dynamic", "factor": 1e300}, "factor must be a positive number from 1 to 1e\\+06"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor 4 must be below high_freq_factor 4",
        ),
        ({"sliding_attention": {"rope_theta": 1e4}}, "sliding_attention alone is not supported"),
    ],
)
def test_an_impossible_rotation_is_named(rope, message):
    with pytest.raises(UserError, match=message):
        parse_config(LLAMA | {"rope_parameters": rope})


@pytest.mark.parametrize("share", [0.001, 0.1])  # of 16 dimensions: none, one
def test_a_rotation_of_no_pair_is_refused(share):
    with pytest.raises(UserError, match=r"partial_rotary_factor must be .* rotates 2, 4 or more dimensions"):
        parse_config({"model_type": "phi3", **SIZES, "partial_rotary_factor": share})


def test_two_original_contexts_are_refused():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    with pytest.raises(UserError, match="original_max_position_embeddings is 32, and 16 in rope_parameters"):
        parse_config(LLAMA | {"rope_parameters": rope, "original_max_position_embeddings": 32})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_windows_are_where_layer_types_says(family):
    given = {"model_type": family, **SIZES, "num_hidden_layers": 4, "sliding_window": 7, "use_sliding_window": True}
    config = parse_config(given | {"layer_types": [SLIDING, FULL, FULL, SLIDING], "head_dim": 16})
    assert [config.window(i) for i in range(4)] == [7, None, None, 7]


def test_windows_without_layer_types_follow_the_family_s_rule():
    given = {**SIZES, "num_hidden_layers": 7, "sliding_window": 7, "head_dim": 16}

    def full(family, **more):
        config = parse_config(given | {"model_type": family} | more)
        return [i for i in range(7) if config.window(i) is None]

    assert full("mistral") == full("phi3") == []
    assert full("qwen2", use_sliding_window=True, max_window_layers=3) == [0, 1, 2]
    assert full("qwen2", max_window_layers=3) == full("llama") == full("olmo2") == list(range(7))
    assert full("gemma2") == [1, 3, 5]
    assert full("gemma3_text") == [5]
    assert full("gemma3_text", sliding_window_pattern=3) == [2, 5]


def test_windows_that_are_switched_off_are_not_asked_for():
    given = LLAMA | {"model_type": "qwen3", "sliding_window": 7, "layer_types": [FULL, SLIDING]}
    with pytest.raises(UserError, match="no sliding_window is in use"):
        parse_config(given | {"use_sliding_window": False})


def test_a_window_of_every_layer_has_no_exceptions():
    with pytest.raises(UserError, match="this family has sliding_window in every layer"):
        parse_config(LLAMA | {"model_type": "mistral", "sliding_window": 7, "layer_types": [FULL, SLIDING]})


def test_a_scaling_that_attention_would_do_otherwise_is_refused():
    gemma = {"model_type": "gemma3_text", **SIZES, "attn_logit_softcapping": 50.0}
    with pytest.raises(UserError, match=r"attn_logit_softcapping 50.0 is not supported for gemma3_text, only None"):
        parse_config(gemma)
    falcon = {"model_type": "falcon", **SIZES, "alibi": True}
    with pytest.raises(UserError, match="alibi True is not supported for falcon, only False"):
        parse_config(falcon)


def test_a_family_s_own_names_are_in_messages():
    falcon = {"model_type": "falcon", **SIZES, "layer_norm_epsilon": -1}
    with pytest.raises(UserError, match="layer_norm_epsilon must be a positive number"):
        parse_config(falcon)


def test_the_decoder_of_a_config_with_images_is_read():
    """Published ones leave out what is the default of the class, numbers of heads among it."""
    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "sliding_window": 7}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    config = parse_config(whole)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.full_layers == () and config.first_window_layer == 0 and config.window(0) == 7
    with pytest.raises(UserError, match=r"config.json: text_config: hidden_size must be .*, got 0"):
        parse_config(whole | {"text_config": text | {"hidden_size": 0}})
    with pytest.raises(UserError, match="quantization_config"):
        parse_config(whole | {"quantization_config": {"quant_method": "gptq"}})


def test_float8_weights_with_scales_are_no_other_config():
    float8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plain = hf_config(tiny_config())
    assert parse_config(plain | {"quantization_config": float8}) == parse_config(plain)


def test_fingerprints_contain_scalings_as_they_always_did():
    assert repr(RopeScaling("linear", 4.0)) == (
        "RopeScaling(kind='linear', factor=4.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)"
    )
    assert "attention_factor=1.2" in repr(RopeScaling("yarn", 4.0, attention_factor=1.2))


def test_a_config_survives_json():
    for config in EXAMPLES.values():
        fields = dataclasses.asdict(config)
        lists = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
        assert ModelConfig.from_json(lists) == config


def test_some_layers_keep_their_windows():
    config = tiny_config(num_layers=6, sliding_window=5, full_layers=(2, 5))
    some = config.of_layers((1, 2, 4, 5))
    assert [some.window(i) for i in range(some.num_layers)] == [5, None, 5, None]


# keys of transformers' classes that do not change what is computed, and those that `parse_config` always reads
HARMLESS = """
architectures attention_dropout bos_token_id chunk_size_feed_forward dtype embd_pdrop eos_token_id
hidden_dropout id2label initializer_range is_decoder label2id output_attentions output_hidden_states pad_token_id
pretraining_tp problem_type resid_pdrop return_dict torch_dtype transformers_version use_cache
"""
READ = "rope_parameters original_max_position_embeddings"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_CLASS])
def test_every_key_of_the_class_of_transformers_is_read_refused_or_harmless(family):
    """But of what has no class of its own. A key that is new there fails here until someone has looked at it."""
    from transformers import AutoConfig

    entry, seen = FAMILIES[family], set()

    class Watched(dict):
        def get(self, key, default=None):
            seen.add(key)
            return dict.get(self, key, default)

        def __contains__(self, key):
            seen.add(key)
            return dict.__contains__(self, key)

        def __or__(self, other):
            return Watched(dict(self) | other)

    parse_config(Watched({"model_type": family, **SIZES, "use_sliding_window": True}))
    known = {key for key in AutoConfig.for_model(family).to_dict() if not key.startswith("_")}
    assert known <= seen | {*READ.split(), *HARMLESS.split(), *UNREAD, *entry.unread}


@pytest.mark.parametrize("family", EXAMPLES)
def test_a_head_that_differs_from_the_embedding_is_used_in_every_family(family, tmp_path):
    config = dataclasses.replace(EXAMPLES[family], tie_embeddings=True)
    params = random_params(config)
    save_directory(tmp_path, config, params)
    file = tmp_path / "model.safetensors"
    names = published_form(config, hf_config(config)).names
    tensors = safetensors.numpy.load_file(file)
    another = np.ascontiguousarray(tensors[names["embedding"]][::-1])
    safetensors.numpy.save_file(tensors | {names["lm_head"]: another}, file, metadata={"format": "pt"})
    found, loaded, _ = load_directory(tmp_path, jnp.float32)
    assert found == dataclasses.replace(config, tie_embeddings=False)
    np.testing.assert_array_equal(loaded["lm_head"], another.T)

"""Published Medusa, Hydra and PPD drafters: read, they compute what is published; written, they are what was read."""

import dataclasses
import pickle
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, load_adapter, save_adapter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.drafters.published import is_published, only_interpretation, write_published
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import Medusa
from jaxspec.weights.shards import map_safetensors
from tests.helpers.methods import batch_of, predict, sequence
from tests.helpers.published_heads import HYDRA, MEDUSA, PPD, Reference, hydra, medusa, ppd, write
from tests.helpers.tiny import TINY, make_prompts, make_tiny

slow = pytest.mark.slow  # PyTorch is there for the slower tests alone
HYDRA2 = HYDRA | {"hydra_head_arch": "prefix-mlp"}
WEIGHTED = PPD | {"aggregation_type": "weighted", "virtual_tokens_per_special_token": 2, "num_virtual_tokens": 6}
POINTS = [2, 5, 11]


def folder_of(folder, config):
    """The folder of a random drafter."""
    if "medusa_num_heads" in config:
        return write(folder, config, {"medusa_lm_head.safetensors": medusa()})
    if "hydra_num_heads" in config:
        return write(folder, config, {"hydra_lm_head.safetensors": hydra(config)})
    return write(folder, config, ppd(config))


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    return Reference(tiny, tmp_path_factory.mktemp("base") / "tiny", sequence(tiny, 20)[0])


def check(tiny, adapter, expected):
    """The logits at `POINTS` against theirs, [G, M, V], to 1e-4 of their size."""
    ours = predict(adapter.method, adapter.trainable, tiny.base, batch_of(sequence(tiny, 20), [POINTS]))[0]
    np.testing.assert_allclose(ours, expected, atol=1e-4 * max(1, np.abs(expected).max()))


@slow
@pytest.mark.parametrize("config", [MEDUSA, HYDRA, HYDRA2], ids=["medusa", "hydra", "hydra++"])
def test_heads_compute_what_is_published(tiny, tmp_path, reference, config):
    adapter = only_interpretation(folder_of(tmp_path, config), tiny)
    if config is MEDUSA:
        assert adapter.method.heads == 5  # of which the config says 2, as published ones do
        expected = reference.medusa(medusa(), 5, 2)
    else:
        expected = reference.hydra(hydra(config), 3, 2)
    check(tiny, adapter, expected[POINTS])


@slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PPD, id="decoder"),
        pytest.param(PPD | {"vt_attention_type": "encoder", "num_exits": 2}, id="encoder-exits"),
        pytest.param(
            PPD
            | {"virtual_tokens_per_special_token": 3, "num_virtual_tokens": 9}
            | {"aggregation_type": "weighted", "use_custom_lm_head": True},
            id="decoder-weighted-head",
        ),
        *(
            pytest.param(
                PPD
                | {"virtual_tokens_per_special_token": 2, "num_virtual_tokens": 6}
                | {"vt_attention_type": mask, "num_exits": 3},
                id=f"{mask}-3-exits",
            )
            for mask in ("encoder", "ensemble", "decoder")
        ),
    ],
)
def test_prompt_tokens_compute_what_is_published(tiny, tmp_path, reference, config):
    folder = folder_of(tmp_path, config)
    assert is_published(folder)
    adapter = only_interpretation(folder, tiny)
    check(tiny, adapter, np.stack([reference.ppd(config, ppd(config), point) for point in POINTS]))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.5, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("method", "config"),
    [
        pytest.param("medusa", MEDUSA, id="medusa"),
        pytest.param("hydra", HYDRA2, id="hydra++", marks=slow),
        pytest.param("ppd", PPD | {"num_exits": 2, "vt_attention_type": "encoder"}, id="ppd", marks=slow),
    ],
)
def test_a_folder_decodes_as_an_adapter(tiny, tmp_path, method, config, sampling):
    drafter = load_drafter(method, tiny, folder_of(tmp_path, config), tree="own")
    prompts, settings = make_prompts(4), {"sampling": sampling, "seed": 3}
    ours = generate(drafter, prompts, 20, batch_size=4, **settings)
    plain = generate(autoregressive(tiny), prompts, 20, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert sum(np.sum(answer.accepted) for answer in ours) > 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_round_trip_is_bit_for_bit(tiny, tmp_path, dtype):
    """Through an adapter on disk."""
    tensors = medusa(dtype=dtype)
    adapter = only_interpretation(write(tmp_path / "in", MEDUSA, {"medusa_lm_head.safetensors": tensors}), tiny)
    save_adapter(tmp_path / "adapter", adapter, adapter.info["published"]["dtype"])
    written = write_published(tmp_path / "out", load_adapter(tmp_path / "adapter", tiny.config), tiny, "medusa")
    assert written == np.dtype(dtype).name
    found = map_safetensors(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].tobytes() == tensor.tobytes(), name
    assert only_interpretation(tmp_path / "out", tiny).method == adapter.method


@pytest.mark.parametrize("tie", [False, True])
def test_heads_without_a_projection_are_written_with_the_bases(tmp_path, tie):
    base = make_tiny(dataclasses.replace(TINY, tie_embeddings=tie))
    method = Medusa(heads=2)
    adapter = Adapter(method, method.init(jax.random.key(0), base.base), base.fingerprint, {})
    write_published(tmp_path / "out", adapter, base, "medusa", "float32")
    again = only_interpretation(tmp_path / "out", base)
    for head in again.trainable["lm_head"]:
        np.testing.assert_array_equal(head, base.params["lm_head"])


def test_what_the_form_lacks_is_named(tiny, tmp_path):
    method = Medusa(lm_head="low_rank")
    adapter = Adapter(method, method.init(jax.random.key(0), tiny.base), tiny.fingerprint, {})
    with pytest.raises(UserError, match="the form medusa has no lm_head low_rank"):
        write_published(tmp_path / "out", adapter, tiny, "medusa")
    with pytest.raises(UserError, match=r"unknown form 'hydra'; forms to write: eagle3, dflash, speculators, medusa"):
        write_published(tmp_path / "out", adapter, tiny, "hydra")
    capped = make_tiny(dataclasses.replace(TINY, logit_cap=30.0))
    with pytest.raises(UserError, match=r"the form medusa is not for bases with logit_cap 30\.0"):
        only_interpretation(folder_of(tmp_path / "in", MEDUSA), capped)


@pytest.mark.parametrize("config", [MEDUSA, HYDRA2, pytest.param(WEIGHTED, marks=slow)])
def test_every_tensor_is_needed_and_none_goes_unread(tiny, tmp_path, config):
    made = (
        {"medusa_lm_head.safetensors": medusa()} if config is MEDUSA else {"hydra_lm_head.safetensors": hydra(HYDRA2)}
    )
    made = ppd(config) if "peft_type" in config else made
    for number, (file, tensors) in enumerate(made.items()):
        for name in tensors.keys() - {"prefix_embeding_layer.embed_tokens.weight"}:  # which nothing reads
            without = {key: value for key, value in tensors.items() if key != name}
            folder = write(tmp_path / f"without-{number}-{name}", config, made | {file: without})
            with pytest.raises(UserError, match=f"tensor '{re.escape(name)}' is missing"):
                only_interpretation(folder, tiny)
        more = tensors | {"extra": np.zeros(3, np.float32)}
        with pytest.raises(UserError, match="tensor 'extra' is not one of this form"):
            only_interpretation(write(tmp_path / f"more-{number}", config, made | {file: more}), tiny)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MEDUSA | {"medusa_num_layers": 1}, r"'0.1.weight' is missing"),
        (MEDUSA | {"medusa_num_layers": 0}, "medusa_num_layers must be a whole number from 1 to 64"),
        (MEDUSA | {"medusa_num_heads": 6}, "tensor '5.0.linear.weight' is missing"),
        (MEDUSA | {"medusa_choices": [[0]]}, "'medusa_choices' .* is not known in this form"),
        (HYDRA | {"grounded_heads": False}, "grounded_heads false, heads that read no tokens, is not supported"),
        (HYDRA | {"hidden_state_offset": 1}, "hidden_state_offset 1 is not supported"),
        (HYDRA | {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn' is not supported; supported: mlp"),
        (PPD | {"token_dim": 64}, "for a base of width 64; 'tiny' has width 32 and 16 tokens"),
        (PPD | {"num_layers": 32}, "num_layers 32 is another base's, 'tiny' has 3"),
        (PPD | {"num_virtual_tokens": 4}, "num_virtual_tokens 4 is not 3 times 1"),
        (PPD | {"use_prefix_tuning": True}, "use_prefix_tuning is not supported"),
        (
            PPD | {"aggregation_type": "adaptive_weighted"},
            "'adaptive_weighted' is not supported; supported: mean, weigh",
        ),
        (PPD | {"vt_attention_type": "full"}, "vt_attention_type 'full' is not supported"),
        (PPD | {"num_exits": 4}, "num_exits must be a whole number from 1 to 3"),
        (PPD | {"peft_type": "LORA"}, "peft_type 'LORA' is not PROMPT_TUNING"),
        (PPD | {"prefix_virtual_tokens": 3}, "prefix_virtual_tokens 3 is not supported"),
        (PPD | {"modules_to_save": ["x"]}, "'modules_to_save' .* is not known in this form"),
        ({"peft_type": "LORA"}, "no form of drafters that is known, found peft_type 'LORA'"),
    ],
)
def test_wrong_configs_are_named(tiny, tmp_path, config, message):
    whole = {"num_special_tokens": 3, "virtual_tokens_per_special_token": 1, "aggregation_type": "mean"}
    parts = {"medusa_lm_head.safetensors": medusa()} if "medusa_num_heads" in config else {}
    parts |= {"hydra_lm_head.safetensors": hydra(HYDRA)} if "hydra_num_heads" in config else {}
    parts |= ppd(PPD | whole) if "peft_type" in config else {}
    with pytest.raises(UserError, match=message):
        only_interpretation(write(tmp_path, config, parts), tiny)


def test_drafters_of_other_bases_are_refused_with_both_sizes(tiny, tmp_path):
    wider = {"0.0.weight": np.zeros((32000, 64), np.float32)}
    made = medusa(2, 2) | {"0.2.weight": wider["0.0.weight"]}
    with pytest.raises(UserError, match="base of width 64 with 32000 tokens; 'tiny' has width 32 and 16 tokens"):
        only_interpretation(write(tmp_path / "a", MEDUSA, {"medusa_lm_head.safetensors": made}), tiny)
    for scale in (1, 2):
        made = hydra(HYDRA) | {"input_embed_fn.weight": scale * np.asarray(tiny.params["embedding"])}
        folder = write(tmp_path / str(scale), HYDRA, {"hydra_lm_head.safetensors": made})
        if scale == 1:
            assert only_interpretation(folder, tiny).method.heads == 3
        else:
            with pytest.raises(UserError, match=r"its copy 'input_embed_fn.weight' of the base's embeddings differs"):
                only_interpretation(folder, tiny)


def test_the_layer_of_hydra_is_llamas(tmp_path):
    base = make_tiny(dataclasses.replace(TINY, head_norms=True))
    with pytest.raises(UserError, match="the form hydra is not for bases with head_norms True, such as 'tiny'"):
        only_interpretation(folder_of(tmp_path, HYDRA2), base)


@slow
def test_weights_that_would_run_code_are_refused(tiny, tmp_path):
    folder = write(tmp_path, HYDRA, {})
    (folder / "hydra_lm_head.pt").write_bytes(pickle.dumps({"hydra_mlp.0.0.linear.weight": _Evil()}))
    with pytest.raises(UserError, match="not a complete file of PyTorch weights"):
        only_interpretation(folder, tiny)


class _Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@slow
def test_weights_that_would_do_nothing_here_are_refused(tiny, tmp_path):
    config = PPD | {"aggregation_type": "weighted"}
    with pytest.raises(UserError, match="weights other than 1 of one prompt token per distance"):
        only_interpretation(folder_of(tmp_path, config), tiny)


def test_numbers_must_be_finite(tiny, tmp_path):
    tensors = medusa()
    tensors["0.0.linear.bias"][0] = np.nan
    with pytest.raises(UserError, match=r"tensor '0.0.linear.bias' holds numbers that are not finite"):
        only_interpretation(write(tmp_path, MEDUSA, {"medusa_lm_head.safetensors": tensors}), tiny)


def test_a_folder_without_a_drafter_says_so(tiny, tmp_path):
    with pytest.raises(UserError, match=r"no drafter there, for it has neither adapter_config.json nor config.json"):
        only_interpretation(tmp_path, tiny)

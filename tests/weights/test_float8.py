"""Which settings of quantisation describe float8 weights that are read."""

import pytest

from jaxspec.weights.float8 import reads_float8


def compressed(**weights):
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"} | weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, False),
        (compressed(), True),
        (compressed(strategy="block", block_structure=[128, 128]), True),
        (compressed(strategy="block", block_structure=[64, 64]), False),
        (compressed(num_bits=4), False),
        (compressed(type="int"), False),
        ({"quant_method": "compressed-tensors"}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        ({}, False),
    ],
)
def test_which_settings_are_read(settings, reads):
    assert reads_float8(settings) is reads

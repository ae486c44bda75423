"""GGUF files in parts, and headers that no file of weights has."""

import re
import struct
import time
import tracemalloc

import gguf
import jax.numpy as jnp
import pytest

from jaxspec.errors import UserError
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.gguf_parts import read_parts
from jaxspec.weights.load import load_model
from tests.helpers.model import TOKENS, assert_same_params, random_params, tiny_config, write_gguf

CONFIG = tiny_config(vocab_size=len(TOKENS))


@pytest.fixture
def parts(tmp_path):
    """A file of 21 tensors in three parts."""
    write_gguf(tmp_path / "tiny.gguf", CONFIG, random_params(CONFIG), tensors_per_part=8)
    return sorted(tmp_path.glob("tiny-0000*-of-00003.gguf"))


def refused(file, message):
    with pytest.raises(UserError, match=message):
        read_parts(file)


def test_any_part_stands_for_all(parts, tmp_path):
    _, params, fingerprint = GGUFFile(write_gguf(tmp_path / "x.gguf", CONFIG, random_params(CONFIG))).load(jnp.float32)
    assert len(parts) == 3
    for part in parts:
        config, loaded, name = GGUFFile(part).load(jnp.float32)
        assert config.num_layers == CONFIG.num_layers and name == fingerprint
        assert_same_params(loaded, params)
    model = load_model(str(parts[1]))
    assert model.decode(model.encode("hello", chat=False)) == "hello"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_parts_are_named(missing, parts):
    given = parts[missing - 1]
    parts[missing].unlink()
    number = (missing - 1) % 3 + 1
    name = re.escape(parts[missing].name)
    refused(given, f"{re.escape(given.name)}: this is part {number} of 3 of a GGUF file, and {name} is missing there")


def test_parts_that_were_renamed_are_told_their_names(parts):
    renamed = parts[1].rename(parts[1].with_name("mine.gguf"))
    refused(renamed, r"mine\.gguf: this is part 2 of 3 .* names back, NAME-00002-of-00003\.gguf and so on")


def test_parts_that_are_others_are_named(parts):
    parts[2].write_bytes(parts[1].read_bytes())
    refused(parts[0], r"tiny-00003-of-00003\.gguf: this is not part 3 of 3; the parts belong to different files")


def test_a_part_that_is_cut_short_is_named(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    refused(parts[0], r"tiny-00003-of-00003\.gguf: not a complete GGUF file")


def text(content, length=None):
    return struct.pack("<Q", len(content) if length is None else length) + content


def header(tensors=0, keys=0):
    return struct.pack("<IIQQ", gguf.GGUF_MAGIC, 3, tensors, keys)


ARRAY, STRING, BYTE = 9, 8, 0
NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(10_000))
HEADERS = {
    "keys": header(keys=2**62),
    "tensors": header(tensors=2**62),
    "many_tensors": header(tensors=10**6),
    "a_key": header(keys=1) + text(b"", 2**30),
    "a_text": header(keys=1) + text(b"x") + struct.pack("<I", STRING) + text(b"", 2**30),
    "numbers": header(keys=1) + text(b"x") + struct.pack("<IIQ", ARRAY, BYTE, 2**62),
    "texts": header(keys=1) + text(b"x") + struct.pack("<IIQ", ARRAY, STRING, 10**9),
    "a_long_text": header(keys=1) + text(b"x") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"", 2**30 - 100),
    "lists": header(keys=1) + text(b"x") + struct.pack("<I", ARRAY) + NESTED,
    "dimensions": header(tensors=1) + text(b"x") + struct.pack("<I", 2**31),
    "a_name": header(tensors=1) + text(b"", 2**63),
    "a_shape": header(tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_absurd_headers_are_refused_at_once(kind, tmp_path):
    """Of files that are a gigabyte long, or empty."""
    file = tmp_path / "x.gguf"
    with file.open("wb") as opened:
        opened.write(HEADERS[kind])
        opened.truncate(2**30 if HEADERS[kind] else 0)
    tracemalloc.start()
    began = time.monotonic()
    refused(file, r"^\S*x\.gguf: not a complete GGUF file \(.*\)$")
    assert time.monotonic() - began < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24

"""The name of a machine, which choices and figures are kept under."""

import os

import pytest

from jaxspec import machine

CORE = "processor\t: {number}\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 {flags}\npower management:\n\n"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("avx avx2", "AMD EPYC with AVX2"),
        ("avx avx2 avx512f avx512bw", "AMD EPYC with AVX-512"),
        ("avx2fake", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(tmp_path, monkeypatch, flags, name):
    file = tmp_path / "cpuinfo"
    file.write_text("".join(CORE.format(number=number, flags=flags) for number in range(2)))
    monkeypatch.setattr(machine, "_CPUS", file)
    assert machine._processor.__wrapped__() == name


@pytest.mark.parametrize("content", [None, "Processor\t: 0\n"])
def test_a_system_that_tells_no_name_gives_the_kind(tmp_path, monkeypatch, content):
    file = tmp_path / "cpuinfo"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(machine, "_CPUS", file)
    assert machine._processor.__wrapped__() == os.uname().machine

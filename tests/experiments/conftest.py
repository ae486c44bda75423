"""A tiny model, and an empty lab."""

import pytest

from experiments.lab.lab import Lab
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def model():
    return make_text_model()


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "results", tmp_path / "work")

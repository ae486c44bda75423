"""A tiny model."""

import pytest

from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def model():
    return make_text_model()

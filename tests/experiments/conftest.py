"""A tiny model, and small studies that are trained on it."""

import pytest

from experiments.trainings import train_study
from tests.helpers.experiments import SMALL, small_run
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def model():
    return make_text_model()


@pytest.fixture(scope="session")
def base_run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="session")
def trained(model, base_run, tmp_path_factory):
    """The folder of all small studies, and their results."""
    folder = tmp_path_factory.mktemp("studies")
    return folder, {study.name: train_study(study, base_run, model, folder) for study in SMALL}

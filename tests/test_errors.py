"""What users are told about bad settings."""

from types import SimpleNamespace

import pytest

from jaxspec.errors import UserError, check_at_least, suggest


def test_what_is_too_small_is_named_as_on_the_command_line():
    settings = SimpleNamespace(batch_size=2, rows=(3, 0), train=SimpleNamespace(save_every=0))
    check_at_least(settings, {"batch_size": 2, "rows": 0, "train.save_every": 0})
    for name, message in (
        ("batch_size", "batch-size must be at least 5, got 2"),
        ("rows", "rows must be at least 5, got 0"),
        ("train.save_every", "train.save-every must be at least 5, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            check_at_least(settings, {name: 5})


def test_no_values_at_all_are_refused():
    with pytest.raises(UserError, match="give at least one value for cache-lengths"):
        check_at_least(SimpleNamespace(cache_lengths=()), {"cache_lengths": 1})


def test_the_beginning_of_a_name_is_recognized():
    assert suggest("ppd", ["bita_7b", "ppd_smollm2", "ppd_7b"]) == " (did you mean 'ppd_smollm2'?)"
    assert suggest("pdd", ["ppd", "medusa"]) == " (did you mean 'ppd'?)"
    assert suggest("", ["ppd"]) == suggest("x", ["ppd"]) == ""

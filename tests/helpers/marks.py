"""Marks of tests: which run always, which are slow, which only when asked."""

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def slow_ones(values, names, name=lambda value: value.name):
    """Parameters of slow tests: those of some names are slow, the others are exhaustive."""
    params = [pytest.param(x, id=name(x), marks=pytest.mark.slow if name(x) in names else EXHAUSTIVE) for x in values]
    assert {*names} <= {param.id for param in params}
    return params

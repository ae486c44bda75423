"""What a step consists of, in a table."""

from jaxspec.bench.overhead import overhead_table


def test_a_step_is_taken_apart():
    found = {"ppd": {"nodes": 3, "rows": 5, "plain": 0.02, "verifying": 0.025, "whole": 0.03}}
    assert "| ppd | 3 | 5 | 20.0 | 5.0 | 5.0 | 30.0 |" in overhead_table(found)

"""Tables as GitHub reads them."""

from jaxspec.markdown import table


def test_a_bar_in_a_cell_begins_no_other():
    lines = [r"| KL(p \|\| q) | 1.5 |", "| --- | --- |", "| a | 2 |"]
    assert table(["KL(p || q)", 1.5], [["a", 2]]) == lines

"""Lines of tables, as GitHub reads them."""

from jaxspec.bench.markdown import row, rule


def test_a_bar_in_a_cell_begins_no_other():
    assert row(["KL(p || q)", 1.5]) == r"| KL(p \|\| q) | 1.5 |"
    assert rule(2) == "| --- | --- |"

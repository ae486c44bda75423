"""A drafter as a user writes it: what is read, its text form, and what is refused with the place and an example."""

import dataclasses

import pytest

from jaxspec.decoding.acceptance import Match, Rejection, Typical
from jaxspec.drafters import METHODS, DrafterSpec, load_drafter, parse_drafter
from jaxspec.drafters.spec import MethodSpec
from jaxspec.errors import UserError
from jaxspec.methods import BiTA, DraftModel, Eagle, Lookahead, Suffix


def test_methods_with_settings_then_settings_in_any_order(tmp_path):
    adapter = f"{tmp_path}/my adapter"
    spec = parse_drafter(f"eagle:confidence=0.30+suffix 'adapter={adapter}' vocabulary=8192  tree=best:5")
    methods = (MethodSpec(Eagle(confidence=0.3), (("confidence", 0.3),)), MethodSpec(Suffix()))
    assert spec == DrafterSpec(methods, "best:5", 8192, adapter)
    (tmp_path / "my adapter").mkdir()
    assert spec.text == "eagle:confidence=0.3+suffix tree=best:5 vocabulary=8192 'adapter=my adapter'"
    plain = dataclasses.replace(spec, adapter=None)
    assert parse_drafter(plain.text) == plain and len({spec, plain, parse_drafter(plain.text)}) == 2


def test_a_draft_model_has_settings_of_its_own(tmp_path):
    """And its folders are named without the way to them."""
    (tmp_path / "small").mkdir()
    spec = parse_drafter(f"draft_model draft={tmp_path}/small draft-adapter=owner/ppd tree=chain:4")
    methods = (MethodSpec(DraftModel()),)
    assert spec == DrafterSpec(methods, "chain:4", draft=f"{tmp_path}/small", draft_adapter="owner/ppd")
    assert spec.text == "draft_model tree=chain:4 draft=small draft-adapter=owner/ppd"


def test_a_list_names_the_methods_of_a_union():
    assert parse_drafter(["medusa", "prompt_lookup"]) == parse_drafter("medusa+prompt_lookup")
    assert parse_drafter("bita") == DrafterSpec((MethodSpec(BiTA()),))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_written_by_its_name(name):
    assert parse_drafter(name).text == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medusaa", "unknown method 'medusaa' (did you mean 'medusa'?)"),
        ("ppd=chain:2", "expected METHOD[:SETTING=VALUE,...][+METHOD...] [tree=SPEC] [vocabulary=N] [adapter=DIR]"),
        ("", "unknown method ''"),
        ("tree=best:5", "unknown method 'tree=best'"),
        ("ppd tre=chain:2", "got 'tre=chain:2' (did you mean 'tree'?)"),
        ("ppd chain:2", "got 'chain:2'"),
        ("ppd tree=", "got 'tree='"),
        ("ppd tree=chain:1 tree=chain:2", "tree is given twice, the second time as 'tree=chain:2'"),
        ("ppd vocabulary=x", "vocabulary must be a whole number, got 'x'"),
        ("ppd 'adapter=x", "No closing quotation"),
        ("ppd+bita", "only one method of a union can have probes or a window, got ppd and bita"),
        ("lookahead:window=wide", "lookahead: window must be a whole number, got 'wide'"),
        ("eagle:confidence=high+suffix", "eagle: confidence must be a number, got 'high'"),
        ("eagle:confidense=1", "eagle has no setting 'confidense' (did you mean 'confidence'?); it has confidence"),
        ("medusa:heads=3", "the settings of medusa are those of its adapter"),
    ],
)
def test_what_cannot_be_read_is_quoted_with_an_example(text, message):
    with pytest.raises(UserError) as error:
        parse_drafter(text)
    said = str(error.value)
    assert said.startswith(f"drafter {text!r}: ") and message in said and "\n" not in said
    assert said.endswith("as in 'eagle:confidence=0.3+suffix tree=best:5 vocabulary=8192'")


def test_a_tree_of_auto_brings_its_own_vocabulary(tiny):
    for text, given in (("ppd tree=auto vocabulary=5", {}), ("ppd vocabulary=5", {"tree": "auto"})):
        with pytest.raises(UserError, match="brings its own vocabulary: leave vocabulary=5"):
            load_drafter(text, tiny, **given)


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("lookahead tree=best:9", {"tree": "best:12"}, "tree is given twice, as 'best:9' and as 'best:12'"),
        ("ppd vocabulary=0", {"draft_vocabulary": 8}, "vocabulary is given twice, as '0' and as '8'"),
        ("ppd adapter=a", {"adapter": "b"}, "adapter is given twice, as 'a' and as 'b'"),
        ("draft_model draft=a", {"draft_model": "b"}, "draft is given twice, as 'a' and as 'b'"),
        (
            "ppd tree=chain:1",
            {"tree": [(rank,) for rank in range(90)]},
            "tree is given twice, as 'chain:1' and as 'given'",
        ),
        ("draft_model draft-adapter=a", {"draft_adapter": "b"}, "draft-adapter is given twice, as 'a' and as 'b'"),
    ],
)
def test_arguments_are_short_forms_and_nothing_is_given_both_ways(tiny, text, given, message):
    with pytest.raises(UserError) as error:
        load_drafter(text, tiny, **given)
    assert str(error.value) == f"drafter {text!r}: {message}"


def test_text_and_arguments_load_the_same(tiny):
    spec = parse_drafter("lookahead:window=3,ngram=3+suffix tree=best:12")
    written, given = load_drafter(spec, tiny), load_drafter("lookahead:window=3,ngram=3+suffix", tiny, tree="best:12")
    assert written.shape == given.shape and written.num_rows == 12
    assert [each.sources[0].method for each in (written, given)] == [Lookahead(window=3, ngram=3)] * 2


def test_a_model_is_named_and_not_printed(tiny):
    with pytest.raises(UserError) as error:
        load_drafter("draft_model draft=x", tiny, draft_model=tiny)
    assert str(error.value) == f"drafter 'draft_model draft=x': draft is given twice, as 'x' and as {tiny.name!r}"


def test_text_decides_no_more_than_its_short_forms(tiny):
    """Of autoregressive decoding, which has no tree to choose."""
    note = load_drafter("autoregressive", tiny, tree="auto").note
    assert note and load_drafter("autoregressive tree=auto", tiny).note == note
    with pytest.raises(UserError, match="autoregressive drafts nothing and has no tree, got 'chain:2'"):
        load_drafter("autoregressive tree=chain:2", tiny)


@pytest.mark.parametrize(
    ("text", "rule", "tree"),
    [
        ("medusa", Rejection(), "own"),
        ("medusa tree=best:8", Rejection(), "best:8"),
        ("medusa+suffix", Rejection(), None),  # whose candidates are never drawn
        ("medusa", Match(), None),
        ("medusa", Typical(), None),
    ],
)
def test_rejection_has_a_tree_whose_candidates_are_drawn(text, rule, tree):
    assert parse_drafter(text).accepted_by(rule).tree == tree


def test_own_trees_are_no_deeper_than_methods_predict(tiny):
    for name in ("lookahead:guesses=9", "suffix", "jacobi", "token_recycling", "prompt_lookup"):
        source = load_drafter(name, tiny, tree="best:40").source
        assert 1 <= source.tree.depth <= source.facts.distances

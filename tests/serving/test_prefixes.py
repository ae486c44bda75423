"""The tree of kept chunks: prompts that begin alike share them, and the least recently used ones go."""

from jaxspec.serving.prefixes import Prefixes


def keep(prefixes, text):
    """Keeps the chunks of a text one by one, as a reader does; a part is the text up to its end."""
    for end in range(prefixes.width, len(text) + 1, prefixes.width):
        prefixes.keep(text[:end], lambda end=end: text[:end])


def found(prefixes, text):
    """The longest kept beginning of a text."""
    return (prefixes.find(text) or [""])[-1]


def test_prompts_share_the_chunks_that_they_begin_with():
    prefixes = Prefixes(count=8, width=2)
    keep(prefixes, "abcdef")
    keep(prefixes, "abcdgh")
    assert len(prefixes) == 4
    assert prefixes.find("abcdghij") == ["ab", "abcd", "abcdgh"]
    assert found(prefixes, "abcdefij") == "abcdef"
    assert found(prefixes, "abcx") == "ab"
    assert found(prefixes, "cdefgh") == ""


def test_the_last_token_is_always_read():
    """Its hidden state decides the next one."""
    prefixes = Prefixes(count=8, width=2)
    keep(prefixes, "abcd")
    assert found(prefixes, "abcd") == "ab"
    assert found(prefixes, "abcde") == "abcd"


def test_the_least_recently_used_chunks_make_room_from_the_end_of_their_prompts():
    prefixes = Prefixes(count=4, width=2)
    keep(prefixes, "abcd")
    keep(prefixes, "efgh")
    assert found(prefixes, "abcd.") == "abcd"  # used
    keep(prefixes, "ij")
    assert [found(prefixes, text + ".") for text in ("abcd", "efgh", "ij")] == ["abcd", "ef", "ij"]
    keep(prefixes, "kl")
    assert len(prefixes) == 4
    assert [found(prefixes, text + ".") for text in ("efgh", "ij", "kl")] == ["ef", "ij", "kl"]
    assert found(prefixes, "abcd.") == "ab"


def test_a_prompt_that_does_not_fit_keeps_its_beginning():
    prefixes = Prefixes(count=2, width=2)
    keep(prefixes, "xy")
    keep(prefixes, "abcdefgh")
    assert found(prefixes, "abcdefgh") == "abcd"
    keep(prefixes, "abcdefgh")  # read again from the start, as for log-probabilities
    assert found(prefixes, "abcdefgh") == "abcd" and len(prefixes) == 2


def test_long_texts_are_apart():
    """Their positions are others, so what was read of the same tokens is another thing."""
    prefixes = Prefixes(count=8, width=2)
    keep(prefixes, "abcd")
    prefixes.keep("ab", lambda: "long ab", long=True)
    assert prefixes.find("abcde") == ["ab", "abcd"]
    assert prefixes.find("abcde", long=True) == ["long ab"]


def test_nothing_is_kept_where_nothing_may_be():
    prefixes = Prefixes(count=0, width=2)
    prefixes.keep("ab", None)
    assert len(prefixes) == 0 and not prefixes.find("abc")

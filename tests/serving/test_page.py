"""The page in a browser."""

import pytest

from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from tests.helpers import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.BINARY is None, reason="there is no Chromium to open the page with"),
]


@pytest.fixture
def page(port, tmp_path):
    with chromium.Page(f"http://127.0.0.1:{port}/", tmp_path / "browser") as page:
        page.wait("$('model').textContent == 'enter the key of this server'")
        page.run("$('key').value = 'secret'; $('key').dispatchEvent(new Event('change')); $('tokens').value = 60")
        page.wait("$('model').textContent == 'tiny with ppd+prompt_lookup'")
        yield page


def test_a_question_is_answered_in_colour(page, engine, tmp_path):
    page.run("$('beside').checked = true; $('prompt').focus()")
    page.type("hello there")
    page.wait("document.querySelector('.figures')?.textContent.includes('the same text')")
    expected = generate(autoregressive(engine.model), ["hello there"], 60)[0]
    assert page.run("document.querySelector('.user').textContent") == "hello there"
    assert page.run("document.querySelector('.answer').textContent") == expected.text
    assert f"{expected.new_tokens} tokens" in page.run("document.querySelector('.figures').textContent")
    colours = page.run(
        "Object.fromEntries([...document.querySelectorAll('.answer span')]"
        ".map((span) => [span.className, getComputedStyle(span).backgroundColor]))"
    )
    assert {"base"} < colours.keys() <= {"base", "learnt", "lookup"}
    assert len({*colours.values()}) == len(colours) and colours["base"] == "rgba(0, 0, 0, 0)"
    for width, height in ((390, 844), (1280, 800)):
        page.resize(width, height)
        page.screenshot(tmp_path / f"{width}.png")
        assert page.run("innerWidth") == width >= page.run("document.documentElement.scrollWidth")


def test_what_the_server_refuses_is_shown(page):
    page.run("$('tokens').value = 500; $('prompt').focus()")
    page.type("hello there")
    page.wait("document.querySelector('.figures.error')?.textContent.includes('exceeds max-length')")
    assert page.run("$('send').textContent") == "Send"

"""The page of learn/ in headless Chromium: its numbers are the library's, for every rule and both loops, by keyboard."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyflash as af
import pytest
from playwright.sync_api import sync_playwright

PAGE = Path(__file__).resolve().parents[2] / "learn" / "page"


@pytest.fixture(scope="module")
def page():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "please install: chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(error))
        page.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        page.goto((PAGE / "index.html").as_uri())
        yield page
        browser.close()
        assert not wrong


def text(page, part):
    return page.inner_text(f"#{part}")


@pytest.mark.parametrize("isa", af._core.instruction_sets())
def test_the_numbers_are_of_today_s_library(isa):
    command = [sys.executable, PAGE / "make_data.py", "--check"]
    assert subprocess.run(command, env=os.environ | {"ANYFLASH_ISA": isa}).returncode == 0


def test_every_rule_and_both_loops_give_the_library_s_results(page):
    rules = page.locator("#rule option").all_inner_texts()
    assert len(rules) >= 5
    for loops in ("2", "1"):
        for rule in rules:
            page.select_option("#loops", loops)
            page.select_option("#rule", rule)
            page.click("#last")
            assert "differ" in text(page, "result")
            assert float(page.get_attribute("#result", "data-error")) < 1e-12


def test_by_keyboard(page):
    page.select_option("#loops", "2")
    page.select_option("#rule", "causal()")
    assert text(page, "position").startswith("step 1 of")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert text(page, "position").startswith("step 3 of") and "partial" in text(page, "says")
    page.keyboard.press("ArrowLeft")
    assert text(page, "position").startswith("step 2 of") and text(page, "result") == ""
    page.keyboard.press("End")
    assert text(page, "says").startswith("Done") and "differ" in text(page, "result")
    page.keyboard.press("Home")
    page.focus("#next")
    page.keyboard.press("Space")  # presses the button, and does not play
    assert text(page, "position").startswith("step 2 of") and text(page, "play") == "play"
    for part in ("#rule", "#loops"):
        page.focus(part)
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")  # a step, not the next rule
        assert page.input_value("#rule") == "causal()" and page.input_value("#loops") == "2"
        assert text(page, "position").startswith("step 2 of")
    page.keyboard.press("Home")
    page.keyboard.press("r")
    assert (
        page.input_value("#rule") == "full()" and "0xfff" in text(page, "words") and "0–2 full" in text(page, "words")
    )
    page.keyboard.press("l")
    assert page.input_value("#loops") == "1" and "memory" in text(page, "says")


def test_a_first_visit_rescales_nothing(page):
    """The first key block of each query block: m rises from -infinity, and there is nothing to rescale."""
    page.select_option("#rule", "causal()")
    page.select_option("#loops", "2")
    page.keyboard.press("Home")
    for _ in range(4):  # S, the words, P, O
        page.keyboard.press("ArrowRight")
        assert page.locator("#state td.rescaled, #tile td.rescaled").count() == 0
    assert page.locator("#state td.changed").count() > 0


def test_a_narrow_page_does_not_scroll_sideways(page):
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 800})
    page.click("#last")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size(size)


def test_hidden_tiles_are_not_visited(page):
    """Causal: 6 of 9 tiles, of which the 3 on the diagonal are partial."""
    page.select_option("#loops", "2")
    page.select_option("#rule", "causal()")
    page.click("#last")
    assert page.locator("#grid td.done").count() == 6 * 16
    assert page.locator("#grid td.skip").count() == 3 * 16 and page.locator("#grid td.partial").count() == 3 * 16
    assert page.locator("#grid td.skip.done").count() == 0

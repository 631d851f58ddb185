"""A real Chromium, by Playwright; tests that ask for it are skipped where either is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from http_fixtures import make_app, serve, wait_for
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 15_000


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer())
    engine.info = replace(INFO, context_length=4096)
    return engine


@pytest.fixture
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serve(make_app(engine)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for a file's tests; a file that asks for it has no test that is a coroutine, for
    Playwright's own event loop runs in this thread.
    """
    api = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium, found or named by CHROMIUM")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Window:
    """A page, its context, and what its console complained of; `close` fails where it did."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, **settings}
        )
        self.context.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.page = self.new_page()

    def new_page(self) -> Any:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._heard)
        page.goto(f"{self.url}/")
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    def _heard(self, message: Any) -> None:
        # A refused or failed request is told there too, and is a part of some tests.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def say(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def begin(self, engine: ScriptedEngine, text: str = "Hello", least: int = 20) -> None:
        """Say it, and wait for so many characters of an answer that goes on slowly."""
        engine.script.delay = 0.02
        self.say(text)
        wait_for(lambda: len(self.text()) > least)

    def answer(self) -> Any:
        """The last answer, which may be under way."""
        return self.page.locator(".message.assistant").last

    def text(self) -> str:
        """Of the last answer so far; empty where there is none."""
        bodies = self.page.locator(".message.assistant .body").all_inner_texts()
        return str(bodies[-1]) if bodies else ""

    def until_answered(self) -> Any:
        self.page.wait_for_selector(".message.assistant:last-child:not(.running) .foot button")
        return self.answer()


@pytest.fixture
def open_window(browser: Any) -> Iterator[Any]:
    """`open_window(url, **settings of the context)` to a `Window`, whose console stays silent: no
    error of a script, and nothing that the policy had to forbid.
    """
    opened: list[Window] = []

    def make(url: str, **settings: Any) -> Window:
        opened.append(Window(browser, url, **settings))
        return opened[-1]

    yield make
    for window in opened:
        window.context.close()
    assert [complaint for window in opened for complaint in window.complaints] == []

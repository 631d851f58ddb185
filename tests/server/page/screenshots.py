"""The pictures of docs/page.md, of a server that runs:

    piecework serve smollm2-135m --piecewise-cuda-graph-compiler eager \\
        --piecewise-cuda-graph-tokens 16,64,256
    python tests/server/page/screenshots.py http://127.0.0.1:30000

Needs a Chromium, and what `make dev` installs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parents[3] / "docs/img"
QUESTIONS = (
    "Write a short Python function that tells whether a year is a leap year.",
    "Name three things that one should know about leap years, as a list.",
)
SETTINGS = {"temperature": 0, "max_tokens": 350}
BUSY, BUSY_TOKENS = 6, 400


def save(page: Any, name: str) -> None:
    page.screenshot(path=FOLDER / name, animations="disabled")
    print(f"{name}: {(FOLDER / name).stat().st_size / 1024:.0f} KiB")


def keep_busy(url: str) -> None:
    """Streams of several clients whose prompts begin alike."""

    def ask(number: int) -> None:
        body = {
            "prompt": "Once upon a time there was a small house. " * 20 + str(number),
            "max_tokens": BUSY_TOKENS,
            "ignore_eos": True,
        }
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    for number in range(BUSY):
        threading.Thread(target=ask, args=(number,), daemon=True).start()


def main(url: str) -> None:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(
            f"localStorage.setItem('piecework-settings', {json.dumps(SETTINGS)!r})"
        )
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        for question in QUESTIONS:
            page.get_by_role("textbox", name="Message", exact=True).fill(question)
            page.keyboard.press("Enter")
            page.wait_for_selector(
                ".message.assistant:last-child:not(.running) .foot button", timeout=120_000
            )
        save(page, "page-chat.png")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 360, "height": 720})
        save(page, "page-narrow.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.get_by_role("link", name="Status").click()
        page.wait_for_selector(".forward, .graphs p:has-text('eagerly')", timeout=60_000)
        keep_busy(url)
        page.wait_for_timeout(14_000)
        save(page, "page-status.png")
        browser.close()


if __name__ == "__main__":
    main((sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000").rstrip("/"))

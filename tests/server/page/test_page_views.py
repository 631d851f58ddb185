"""Figures, images, small screens, keys, and what a hostile file or a full browser does to the page,
in a real Chromium.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import serve, wait_for
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.runtime.core.engine_info import GraphInfo, PieceCalls
from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.messages import GenerateImage, ImageOutput, ImageStats
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.server.config.images import ImageServerConfig
from piecework.server.engine.state import EngineState
from piecework.server.image_service import create_image_app
from piecework.server.images.client import ImageJob

pytestmark = pytest.mark.slow

NARROW = {"width": 360, "height": 640}
GRAPHS = GraphInfo(
    prefill_backend="piecewise",
    decode_backend="full",
    distinct_pieces=2,
    prefill_sizes=[16, 64],
    failed_sizes={"512": "out_of_memory"},
    pending_sizes=[1024],
    calls=[
        PieceCalls(piece=0, op="piecework::attention", times=30, kinds=4),
        PieceCalls(piece=1, op=None, times=1, kinds=3),
    ],
)
HOSTILE_TITLE = "<img src=x onerror=alert(1)>" + "\u202e" + "x" * 5000
KEEP = """async (count) => {
  const { put } = await import('/page/store.js');
  const infos = Array.from({ length: count }, (_, at) => ({ id: `c${at}`, title: `Talk ${at}`,
    created: at, updated: at, chosen: {}, settings: {} }));
  await put('conversations', ...infos);
}"""


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer())
    engine.info = replace(INFO, context_length=4096, graphs=GRAPHS)
    engine.stats = replace(
        engine.stats,
        graph_fallbacks_total={"too_long": 3},
        draft_tokens_total=4000,
        accepted_tokens_total=3000,
        encoded_images_total=3,
        image_hits_total=2,
        encoder_seconds_total=1.5,
        encoder_bytes=4 * 2**20,
    )
    return engine


def test_the_figures_move_and_requests_are_shown_without_their_texts(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    window = open_window(url)
    page = window.page
    window.begin(engine, "a secret word")
    page.get_by_role("link", name="Status").click()
    page.wait_for_selector(".phase.decode")
    row = page.locator(".status tbody tr").inner_text()
    assert "secret" not in row and engine.requests[0].rid not in page.content()
    figures = dict(
        zip(
            page.locator(".chart .label").all_inner_texts(),
            page.locator(".chart .figure").all_inner_texts(),
            strict=True,
        )
    )
    assert (figures["Running"], figures["Waiting"]) == ("3", "2")
    assert figures["KV cache in use"] == "25 %"
    engine.stats = replace(engine.stats, generation_tokens_total=10**6, running_requests=7)
    page.wait_for_selector(".chart .figure:text-is('7')")
    speed = page.locator(".chart:has-text('Tokens/s') .figure").first
    wait_for(lambda: speed.inner_text() not in ("–", "0"))
    shown = page.locator(".graphs").inner_text()
    for part in ("31 pieces, 2 of them distinct", "× 30", "1,024", "out of memory", "too long"):
        assert part in shown
    facts = page.locator(".status").inner_text()
    assert "3,000 of 4,000 proposed tokens accepted (75 %)" in facts
    assert "3 encoded in 1.5 s, 2 found, 4 MiB kept" in facts
    engine.state = EngineState.RESTARTING
    page.wait_for_selector("text=The engine is restarting.")
    page.get_by_role("link", name="Chat").click()
    page.wait_for_selector(".message.assistant")


class Draws:
    """An engine of images that draws one colour, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateImage] = []
        self.state, self.info, self.failure = EngineState.READY, None, None
        self.stats = ImageStats()
        self.restarts = self.hangs = self.num_unfinished = 0
        self.silence = 0.0
        self.replicas: tuple[Any, ...] = ()
        self.jobs: list[ImageJob] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def unfinished(self) -> Iterator[Any]:
        return iter(self.jobs)

    async def generate(self, request: GenerateImage) -> ImageOutput:
        self.asked.append(request)
        self.jobs = [ImageJob(request)]
        self.jobs[0].progress = (3, 20)
        await asyncio.to_thread(self.may_end.wait, 10)
        self.jobs = []
        if request.params.prompt == "fail":
            return ImageOutput(
                rid=request.rid, finish_reason=FinishReason.ERROR, error="it broke", code="no_way"
            )
        return ImageOutput(
            rid=request.rid,
            finish_reason=FinishReason.STOP,
            pixels=b"\x20\x80\xe0" * (64 * 48),
            width=64,
            height=48,
        )


def test_images_are_drawn_kept_and_saved(open_window: Any, tmp_path: Path) -> None:
    engine: Any = Draws()
    config = ImageServerConfig(
        engine=DiffusionConfig(model_path="models/toy"), served_model_name="painter"
    )
    with serve(create_image_app(engine, config)) as url:
        window = open_window(url)
        page = window.page
        assert page.locator("nav a").all_inner_texts() == ["Images", "Status"]
        page.get_by_label("Prompt", exact=True).fill("<b>a fox</b>")
        page.get_by_label("How many").fill("2")
        page.get_by_label("Size").fill("64x48")
        page.get_by_label("Seed").fill("7")
        page.get_by_label("Steps").fill("3")
        engine.may_end.clear()
        page.get_by_role("button", name="Draw").click()
        page.wait_for_selector("text=step 3 of 20")
        engine.may_end.set()
        page.wait_for_selector(".gallery li:nth-child(2) img")
        asked = [(one.params.seed, one.params.num_inference_steps) for one in engine.asked]
        assert asked == [(7, 3), (8, 3)]
        image = page.locator(".gallery img").first
        assert (
            image.evaluate("async (img) => { await img.decode(); return img.naturalWidth }") == 64
        )
        assert page.locator(".gallery b").count() == 0
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").first.click()
        download.value.save_as(tmp_path / "image.png")
        assert (tmp_path / "image.png").read_bytes().startswith(b"\x89PNG")
        page.get_by_label("Prompt", exact=True).fill("fail")
        page.get_by_role("button", name="Draw").click()
        page.wait_for_selector(".problem:has-text('it broke')")
        page.reload()
        page.wait_for_selector(".gallery li:nth-child(2) img")
        page.get_by_role("link", name="Status").click()
        page.wait_for_selector("text=painter is ready.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_small_screen_shows_all_without_a_side_scroll(
    engine: ScriptedEngine, url: str, open_window: Any, scheme: str
) -> None:
    long = "W" * 300 + "\n\n|a|b|\n|-|-|\n|" + "x" * 80 + "|" + "y " * 60 + "|\n\n```\n" + "z" * 300
    engine.script.reply = lambda request: [
        *engine.tokenizer.encode(long, add_special_tokens=False),
        2,
    ]
    window = open_window(url, viewport=NARROW, color_scheme=scheme)
    page = window.page
    window.say("U" * 300)
    window.until_answered()
    for view in ("Chat", "Status"):
        page.get_by_role("link", name=view).click()
        page.wait_for_timeout(200)
        wide = page.evaluate(
            "[...document.querySelectorAll('body, main, .log, .status, .message')]"
            ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className)"
        )
        assert wide == [], view
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Conversations").click()
    page.locator(".conversations .open").click()
    page.wait_for_selector(".sidebar", state="hidden")
    page.get_by_role("button", name="Settings").click()
    box = page.locator("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_keys_and_names_are_enough_to_use_it(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    engine.script.delay = 0.02
    window = open_window(url)
    page = window.page
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message"
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    wait_for(lambda: len(window.text()) > 20)
    page.keyboard.press("Escape")
    window.until_answered()
    heard = page.locator("#announcer").inner_text()
    assert "Answering" in heard and "The answer has ended" in heard
    page.keyboard.press("Alt+KeyN")
    assert page.locator(".message").count() == 0
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, a, input, select, textarea')].filter(e => "
        "!(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    shown = []
    for _ in range(30):
        page.keyboard.press("Tab")
        shown.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert set(shown) <= {"auto", "solid", "none"} and shown.count("solid") > 8


def test_a_chosen_theme_stays(url: str, open_window: Any) -> None:
    window = open_window(url, color_scheme="dark")
    page = window.page
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.get_by_role("button", name="Theme").click()
    light = page.evaluate(paper)
    page.reload()
    assert light != dark and page.evaluate(paper) == light


def test_a_hostile_file_is_text_or_refused(url: str, open_window: Any, tmp_path: Path) -> None:
    window = open_window(url)
    page = window.page
    loop = [
        {"id": "a", "parent": "b", "role": "user", "text": "loop"},
        {"id": "b", "parent": "a", "role": "user", "text": "loop"},
    ]
    good = {"id": "g", "parent": None, "role": "user", "text": "<script>alert(1)</script>"}
    answer = {
        "id": "__proto__", "parent": "g", "role": "assistant", "text": "[x](javascript:alert(1))",
        "calls": "none", "timing": {"tokens": "<b>"}, "state": "running", "created": "1e999",
    }  # fmt: skip
    told = {
        "format": "piecework-conversations",
        "conversations": [
            {"title": HOSTILE_TITLE, "messages": [*loop, good, answer, None, 5, {"role": "x"}],
             "chosen": {"top": "a", "__proto__": "g"}, "settings": {"temperature": "hot"}},
            "none", None,
        ],
    }  # fmt: skip
    cases: dict[str, tuple[bytes, str]] = {
        "no.json": (b"{", "The file is no JSON."),
        "other.json": (b"[1]", "holds no conversations"),
        "deep.json": (b"[" * 100_000, "no JSON"),
        "good.json": (json.dumps(told).encode(), "Imported: 3"),
    }
    for name, (content, says) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        page.get_by_label("File with conversations").set_input_files(path)
        page.wait_for_selector(f".sidebar .note:has-text('{says}')")
    page.locator(".conversations .open:has-text('onerror')").click()
    page.wait_for_selector(".message.user")
    assert page.locator(".message .body").all_inner_texts() == ["<script>alert(1)</script>", "x"]
    assert page.locator(".conversations img, .message a, .message script").count() == 0
    assert page.locator(".sidebar").bounding_box()["width"] < 300


def test_settings_of_a_file_that_cannot_be_sent_take_no_message(
    url: str, open_window: Any, tmp_path: Path
) -> None:
    window = open_window(url)
    page = window.page
    message = {"id": "a", "parent": None, "role": "user", "text": "One"}
    told = {
        "format": "piecework-conversations",
        "conversations": [{"title": "x", "messages": [message], "settings": {"schema": "{oh"}}],
    }
    (tmp_path / "file.json").write_text(json.dumps(told))
    page.get_by_label("File with conversations").set_input_files(tmp_path / "file.json")
    page.locator(".conversations .open").click()
    page.wait_for_selector(".message.user")
    window.say("Two")
    page.wait_for_selector(".problem:has-text('JSON schema')")
    field = page.get_by_role("textbox", name="Message", exact=True)
    assert field.input_value() == "Two" and page.locator(".message").count() == 1


def test_of_thousands_of_conversations_those_in_sight_are_drawn(url: str, open_window: Any) -> None:
    window = open_window(url)
    page = window.page
    page.evaluate(KEEP, 5000)
    page.reload()
    page.wait_for_selector(".conversations .open:has-text('Talk 4999')")
    assert page.locator(".conversations li").count() < 100
    page.get_by_label("Find a conversation").fill("talk 17")
    page.wait_for_selector(".conversations .open:has-text('Talk 17')")


def test_the_page_waits_for_a_model_that_is_still_loading(
    engine: ScriptedEngine, browser: Any, url: str
) -> None:
    engine.state, info, engine.info = EngineState.STARTING, engine.info, None
    assert httpx.get(f"{url}/v1/models").status_code == 503
    page = browser.new_page()
    page.goto(url)
    page.wait_for_selector(".banner:not([hidden])")
    assert page.get_by_role("textbox", name="Message").is_visible()
    engine.state, engine.info = EngineState.READY, info
    page.wait_for_selector(".banner", state="hidden")
    page.wait_for_selector("option:text-is('toy')", state="attached")
    page.close()


def card(name: str, kind: str, state: str) -> dict[str, Any]:
    """As `/v1/models` of a server of several models has it."""
    status = {
        "kind": kind,
        "value": state,
        "requests": 1,
        "waiting": 2,
        "memory": 0,
        "memory_needed": 2**30,
        "pinned": False,
        "idle_seconds": None,
        "failure": None,
    }
    return {"id": name, "object": "model", "status": status}


def test_several_models_are_chosen_loaded_and_looked_at(
    engine: ScriptedEngine, url: str, browser: Any
) -> None:
    cards = [card("toy", "text", "ready"), card("big <b>", "text", "unloaded")]
    cards.append(card("painter", "images", "loading"))
    asked: list[tuple[str, Any]] = []

    def change(route: Any) -> None:
        asked.append((route.request.url.rpartition("/")[2], route.request.post_data_json["model"]))
        cards[1]["status"]["value"] = "ready"
        route.fulfill(json=cards[1])

    page = browser.new_page()
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.route("**/v1/models/*", change)
    page.goto(url)
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator("nav a").all_inner_texts() == ["Chat", "Images", "Status"]
    options = page.get_by_label("Model").locator("option").all_inner_texts()
    assert options == ["toy", "big <b> (unloaded)"]
    page.get_by_role("link", name="Status").click()
    page.get_by_role("button", name="Load big <b>").click()
    page.get_by_role("button", name="Unload big <b>").wait_for()
    assert asked == [("load", "big <b>")]
    page.wait_for_selector(".phase.loading")
    page.wait_for_selector("text=toy is ready.")
    page.get_by_role("button", name="big <b>", exact=True).click()
    page.wait_for_selector("text=big <b> has not been loaded.")
    page.close()


BLOCKED = """for (const name of ['sessionStorage', 'localStorage', 'indexedDB']) {
  Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError') } });
}"""


def test_a_browser_that_keeps_nothing_has_a_chat_all_the_same(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.add_init_script(BLOCKED)
    page.goto(url)
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:not(.running) .prose p")
    page.wait_for_selector(".sidebar .note:has-text('Nothing is kept here')")
    page.close()


def test_a_server_that_refuses_is_asked_ever_more_seldom(url: str, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=429, json={"error": {"message": "too many"}})

    page.route("**/v1/status", refuse)
    page.goto(url)
    wait_for(lambda: bool(asked) or page.wait_for_timeout(50))
    page.wait_for_timeout(2500)
    assert 2 <= len(asked) <= 5
    page.close()


def test_models_are_looked_at_by_one_look_at_a_time(url: str, browser: Any) -> None:
    """A server that is away for long is not asked by all that waited when it is back."""
    cards = [card("toy", "text", "ready")]
    asked: list[float] = []
    page = browser.new_page()
    page.clock.install()
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.goto(url)
    page.wait_for_selector("option:text-is('toy')", state="attached")
    page.route("**/v1/status", lambda route: route.abort())
    page.route("**/health", lambda route: route.abort())
    for _ in range(30):
        page.clock.run_for(5000)
    page.on("request", lambda one: asked.append(1.0) if "v1/status" in one.url else None)
    page.unroute("**/v1/status")
    page.unroute("**/health")
    page.clock.run_for(6000)
    page.wait_for_selector(".banner", state="hidden")
    assert len(asked) <= 4
    page.close()


def test_the_skip_link_stays_in_its_view(url: str, open_window: Any) -> None:
    page = open_window(url).page
    page.get_by_role("link", name="Status").click()
    page.wait_for_selector(".status .lead.ready")
    page.get_by_role("link", name="Skip to the content").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(200)
    assert page.title() == "Status · Piecework" and page.url.endswith("#status")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_model_that_failed_says_why_and_a_long_name_leaves_room(url: str, browser: Any) -> None:
    name = "a-long-name/" * 20
    cards = [card("toy", "text", "ready"), card(name, "text", "failed")]
    cards[1]["status"]["failure"] = "it has no weights"
    page = browser.new_page(viewport=NARROW)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.goto(f"{url}/#status")
    chosen = page.get_by_role("button", name=name, exact=True)
    chosen.click()
    page.wait_for_selector(".lead:has-text('has failed: it has no weights')")
    assert chosen.bounding_box()["width"] < 160
    page.close()

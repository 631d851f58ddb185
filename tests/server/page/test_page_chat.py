"""Chats in a real Chromium, against the application over a scripted engine behind a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import make_app, serve, wait_for
from scripted_engine import INFO, REPLY, ScriptedEngine, prompt_of, say_once
from server_process import free_port
from toy_tokenizer import CHAT_TEMPLATE, toy_tokenizer

from piecework.server.engine.state import EngineState

KEY = "sésame 1"
CALLING_TEMPLATE = CHAT_TEMPLATE.replace(
    "m['content']", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '')"
)
HOSTILE = (
    "<script>window.stolen = 1</script> <img src=x onerror='window.stolen = 1'>\n\n"
    "[one](javascript:window.stolen=1) [two](https://a.example/x) <b>bold</b>\n\n"
    "![seen](https://spy.example/p.png) data:text/html,x [three](/v1/models)\n\n"
    "```html\n<script>window.stolen = 1</script>\n```"
)


def test_an_answer_is_shown_as_markdown_and_none_of_it_is_run(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, f"# Title\n\n- **a**\n- `b`\n\n{HOSTILE}")
    window = open_window(url)
    asked: list[str] = []
    window.page.on("request", lambda request: asked.append(request.url))
    window.say("<i>Hello</i>")
    answer = window.until_answered()
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("li strong").inner_text() == "a"
    assert answer.locator("script, img, b, iframe").count() == 0
    links = answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://a.example/x", rel, "_blank"],
        ["https://spy.example/p.png", rel, "_blank"],
    ]
    assert answer.locator("pre").inner_text().strip() == "<script>window.stolen = 1</script>"
    assert window.page.locator(".message.user .body").inner_text() == "<i>Hello</i>"
    assert window.page.evaluate("window.stolen") is None
    assert all(address.startswith(("http://127.0.0.1", "blob:")) for address in asked)
    assert " tokens" in answer.locator(".figures").inner_text()


@pytest.mark.slow
def test_stop_keeps_what_came_and_go_on_continues_it(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    window = open_window(url)
    window.begin(engine)
    window.page.keyboard.press("Escape")
    window.page.wait_for_selector("button[title='Go on']")
    wait_for(lambda: len(engine.dropped) == 1)
    text = window.text()
    engine.script.delay = 0.0
    say_once(engine, " The end.")
    window.page.get_by_role("button", name="Go on").click()
    wait_for(lambda: "The end." in window.text())
    whole = window.text()
    assert whole.startswith(text) and whole.endswith("The end.")
    assert prompt_of(engine).rstrip().endswith(text.rstrip()[-10:])


@pytest.mark.slow
def test_a_reload_in_the_middle_keeps_what_came(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    window = open_window(url)
    window.begin(engine, least=150)
    window.page.reload()
    window.page.wait_for_selector("text=This answer was interrupted.")
    assert window.text().startswith(REPLY[:20])
    assert window.page.locator(".conversations .open").inner_text() == "Hello"
    wait_for(lambda: len(engine.dropped) == 1)


@pytest.mark.slow
def test_an_edit_is_a_branch_that_a_reload_keeps(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, "One.", "Two.", "Three.")
    window = open_window(url)
    page = window.page
    window.say("First")
    window.until_answered()
    page.keyboard.press("ArrowUp")
    page.get_by_role("textbox", name="Edit the message").fill("Second")
    page.keyboard.press("Enter")
    page.wait_for_selector('.prose p:text-is("Two.")')
    assert "First" not in prompt_of(engine) and "Second" in prompt_of(engine)
    window.until_answered()
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector('.prose p:text-is("Three.")')
    window.until_answered()
    shown = page.locator(".branches span")
    assert shown.all_inner_texts() == ["2 / 2", "2 / 2"]
    page.locator(".message.user").get_by_role("button", name="Previous branch").click()
    assert page.locator(".message .body").all_inner_texts() == ["First", "One."]
    page.wait_for_timeout(200)
    page.reload()
    page.wait_for_selector('.prose p:text-is("One.")')
    page.get_by_role("button", name="Next branch").click()
    assert page.locator(".message .body").all_inner_texts() == ["Second", "Three."]


@pytest.mark.slow
def test_a_server_that_restarts_meanwhile_goes_on(engine: ScriptedEngine, open_window: Any) -> None:
    port = free_port()
    with serve(make_app(engine), port) as url:
        window = open_window(url)
        window.begin(engine)
    window.page.wait_for_selector(".banner:not([hidden])")
    before = window.text()
    engine.script.delay = 0.0
    say_once(engine, " The end.")
    with serve(make_app(engine), port):
        window.page.wait_for_selector(".banner", state="hidden")
        window.until_answered()
        whole = window.text()
        window.page.goto("about:blank")
    assert whole.startswith(before) and whole.endswith("The end.")


@pytest.mark.slow
def test_the_key_is_asked_for_once_and_stays_in_the_tab(
    engine: ScriptedEngine, open_window: Any, browser: Any
) -> None:
    say_once(engine, "Fine.")
    with serve(make_app(engine, api_key=KEY)) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.get_by_role("textbox", name="Key").fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=does not know this key")
        page.get_by_role("textbox", name="Key").fill(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready]", state="attached")
        page.get_by_role("textbox", name="Message").fill("Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector('.prose p:text-is("Fine.")')
        kept = page.evaluate(
            "JSON.stringify([localStorage, document.cookie]) + '|' + JSON.stringify(sessionStorage)"
        )
        outside, _, inside = kept.partition("|")
        assert KEY not in outside and KEY in inside
        other = context.new_page()
        other.goto(url)
        other.wait_for_selector("dialog")
        context.close()


@pytest.mark.slow
def test_an_error_is_told_in_its_place_and_tried_again(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    engine.script.fail_after = 3
    window = open_window(url)
    window.say("Hello")
    error = window.page.wait_for_selector(".message .error")
    assert "could not finish" in error.inner_text()
    engine.script.fail_after = None
    say_once(engine, "Better.")
    window.page.get_by_role("button", name="Try again").click()
    window.page.wait_for_selector('.prose p:text-is("Better.")')


@pytest.mark.slow
def test_thoughts_and_calls_are_folded_and_results_go_back(
    open_window: Any,
) -> None:
    engine = ScriptedEngine(toy_tokenizer(chat_template=CALLING_TEMPLATE))
    engine.info = replace(INFO, context_length=4096)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
    say_once(engine, f"<think>Hm, hm.</think>{call}", "Sunny.")
    app = make_app(engine, reasoning_parser="think", tool_call_parser="hermes")
    with serve(app) as url:
        window = open_window(url)
        page = window.page
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("Tools", exact=True).click()
        field = page.get_by_label("Functions, as JSON")
        field.fill("{oh")
        page.get_by_role("button", name="Save").click()
        page.wait_for_selector(".problem:has-text('Tools')")
        field.fill(json.dumps({"name": "weather", "parameters": {"type": "object"}}))
        page.get_by_label("System prompt").fill("Be kind.")
        page.get_by_role("button", name="Save").click()
        window.say("Hello")
        window.until_answered()
        assert page.locator(".thought[open], .call[open]").count() == 0
        assert page.locator(".thought .plain").text_content() == "Hm, hm."
        assert json.loads(page.locator(".call pre").text_content()) == {"city": "東京"}
        assert "Be kind." in prompt_of(engine)
        page.get_by_label("Result of weather").fill("25 degrees")
        page.get_by_role("button", name="Send results").click()
        page.wait_for_selector('.prose p:text-is("Sunny.")')
        assert "25 degrees" in prompt_of(engine) and "weather" in prompt_of(engine)
        assert page.get_by_role("button", name="Send results").count() == 0


@pytest.mark.slow
def test_conversations_are_renamed_deleted_saved_and_loaded(
    engine: ScriptedEngine, url: str, open_window: Any, tmp_path: Path
) -> None:
    say_once(engine, "One.", "Two.")
    window = open_window(url)
    page = window.page
    window.say("Hello")
    window.until_answered()
    row = page.locator(".conversations li")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    page.get_by_label("New title").fill("<b>Mine</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector(".conversations .open:has-text('<b>Mine</b>')")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    path = tmp_path / "saved.json"
    download.value.save_as(path)
    row.hover()
    row.get_by_role("button", name="Delete").click()
    row.get_by_role("button", name="Delete").click()
    page.wait_for_selector(".conversations li", state="detached")
    page.get_by_label("File with conversations").set_input_files(path)
    page.locator(".conversations .open").click()
    page.wait_for_selector('.prose p:text-is("One.")')
    assert page.locator(".message .body").all_inner_texts() == ["Hello", "One."]


def refuse(page: Any, code: str) -> None:
    error = {"message": "It is full.", "type": "t", "param": None, "code": code}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error})
    )


@pytest.mark.slow
def test_what_came_of_an_answer_outlives_a_refusal_to_go_on(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    window = open_window(url)
    page = window.page
    window.begin(engine)
    page.keyboard.press("Escape")
    page.wait_for_selector("button[title='Go on']")
    text = window.text()
    for code in ("context_length_exceeded", "chat_template_error"):
        refuse(page, code)
        page.get_by_role("button", name="Go on").click()
        page.wait_for_selector(".message .error:has-text('It is full.')")
        assert window.text() == text, code
        page.reload()
        page.wait_for_selector(".message .error")


@pytest.mark.slow
def test_an_answer_with_a_schema_is_asked_for_anew(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    """The grammar would have the rest alone be a whole object."""
    window = open_window(url)
    page = window.page
    asked: list[dict[str, Any]] = []
    page.on("request", lambda one: asked.append(one.post_data_json) if one.post_data else None)
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("JSON schema of answers").click()
    page.get_by_label("JSON schema", exact=True).fill('{"type": "object"}')
    page.get_by_label("Temperature").fill("0.33")
    page.get_by_role("button", name="Save").click()
    window.begin(engine)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Go on").click()
    wait_for(lambda: len(asked) == 2)
    assert asked[0] == asked[1] and asked[0]["temperature"] == 0.33


@pytest.mark.slow
def test_a_server_that_stops_ends_no_answer(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    """It ends what still runs after --drain-timeout, and goes."""
    window = open_window(url)
    window.begin(engine)
    engine.state = EngineState.DRAINING
    httpx.post(f"{url}/abort_request", json={"abort_all": True}).raise_for_status()
    window.page.wait_for_selector(".banner:not([hidden])")
    before = window.text()
    engine.script.delay = 0.0
    say_once(engine, " The end.")
    engine.state = EngineState.READY
    window.until_answered()
    assert window.text().startswith(before) and window.text().endswith("The end.")


@pytest.mark.slow
def test_an_edit_waits_for_the_answer_that_runs(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    window = open_window(url)
    page = window.page
    window.begin(engine, "First")
    page.get_by_role("button", name="Edit", exact=True).click()
    field = page.get_by_role("textbox", name="Edit the message")
    field.fill("Second")
    page.keyboard.press("Enter")
    page.wait_for_selector(".problem:has-text('under way')")
    assert field.input_value() == "Second"
    page.get_by_role("button", name="Stop").click()
    window.until_answered()
    engine.script.delay = 0.0
    say_once(engine, "Two.")
    field.press("Enter")
    page.wait_for_selector('.prose p:text-is("Two.")')


@pytest.mark.slow
def test_a_conversation_that_another_tab_deletes_does_not_come_back(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, "One.", "Two.")
    window = open_window(url)
    page = window.page
    window.say("Hello")
    window.until_answered()
    other = window.new_page()
    row = other.locator(".conversations li")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    other.get_by_label("New title").fill("Mine")
    other.keyboard.press("Enter")
    page.wait_for_selector(".conversations .open:has-text('Mine')")
    window.say("Again")
    page.wait_for_selector('.prose p:text-is("Two.")')
    window.until_answered()
    page.wait_for_selector(".conversations .open:has-text('Mine')")
    row.hover()
    row.get_by_role("button", name="Delete").click()
    row.get_by_role("button", name="Delete").click()
    page.wait_for_selector(".conversations li", state="detached")
    assert page.locator(".message").count() == 0
    window.say("New")
    window.until_answered()
    assert page.locator(".conversations .open").all_inner_texts() == ["New"]

"""What goes with a message and what is done with conversations, in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_fixtures import make_app, serve, wait_for
from image_stand_in import StandIn, base64_of, data_url, image_file
from scripted_engine import ScriptedEngine, prompt_of, say_once

pytestmark = pytest.mark.slow


def sent_by(page: Any) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    return sent


def test_files_go_with_a_message_as_text(
    engine: ScriptedEngine, url: str, open_window: Any, tmp_path: Path
) -> None:
    say_once(engine, "Fine.", "Better.")
    (tmp_path / "a.md").write_text("```\nhello\n```\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    window = open_window(url)
    page, sent = window.page, sent_by(window.page)
    field = page.get_by_label("Files to attach")
    field.set_input_files([tmp_path / "a.md", tmp_path / "picture.bin"])
    page.wait_for_selector(".problem:has-text('picture.bin is not text')")
    assert page.locator(".files bdi").all_inner_texts() == ["a.md"]
    window.say("What is it?")
    window.until_answered()
    content = "File: a.md\n````\n```\nhello\n```\n````\n\nWhat is it?"
    assert sent[-1]["messages"] == [{"role": "user", "content": content}]
    assert page.locator(".files li").count() == 0
    page.reload()
    page.locator(".message.user summary").get_by_text("a.md").wait_for()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit the message").fill("And now?")
    page.keyboard.press("Enter")
    page.wait_for_selector('.prose p:text-is("Better.")')
    assert sent[-1]["messages"][0]["content"] == content.replace("What is it?", "And now?")


def test_every_sampling_setting_is_sent_by_its_name(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, "Fine.")
    window = open_window(url)
    page, sent = window.page, sent_by(window.page)
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 9, "seed": 7,
        "frequency_penalty": 0.25, "presence_penalty": -0.5, "repetition_penalty": 1.1,
    }  # fmt: skip
    page.get_by_role("button", name="Settings").click()
    for name, value in given.items():
        page.get_by_label(name, exact=True).fill(str(value))
    page.get_by_label("stop", exact=True).fill("END\n\\n\\n")
    page.get_by_role("button", name="Save").click()
    window.say("Hello")
    assert window.until_answered().locator(".error").count() == 0
    assert given.items() <= sent[-1].items() and sent[-1]["stop"] == ["END", "\n\n"]


def test_an_edited_answer_is_a_branch_that_is_gone_on_with(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, "One.", " The end.")
    window = open_window(url)
    page = window.page
    window.say("Hello")
    window.until_answered().get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit the message").fill("Once upon a time.")
    page.get_by_role("button", name="Save").click()
    assert window.text() == "Once upon a time." and len(engine.requests) == 1
    assert page.locator(".branches span").all_inner_texts() == ["2 / 2"]
    page.get_by_role("button", name="Go on").click()
    page.wait_for_selector(".prose p:has-text('The end.')")
    assert window.text().startswith("Once upon a time.")
    assert prompt_of(engine).rstrip().endswith("Once upon a time.")


def test_a_conversation_is_found_by_its_messages_and_saved_as_markdown(
    engine: ScriptedEngine, url: str, open_window: Any, tmp_path: Path
) -> None:
    say_once(engine, "**Paris**, of course.", "Madrid.")
    window = open_window(url)
    page = window.page
    for text in ("France?", "Spain?"):
        window.say(text)
        window.until_answered()
        page.get_by_role("button", name="New conversation").click()
    titles = page.locator(".conversations .open")
    page.get_by_label("Find a conversation").fill("paris")
    wait_for(lambda: titles.all_inner_texts() == ["France?"])
    page.locator(".conversations li").hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export France? as Markdown").click()
    assert download.value.suggested_filename == "France-.md"
    download.value.save_as(tmp_path / "saved.md")
    saved = (tmp_path / "saved.md").read_text()
    assert saved == "# France?\n\n## You\n\nFrance?\n\n## Answer\n\n**Paris**, of course.\n"


def test_the_meter_tells_how_much_of_the_context_is_used(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    say_once(engine, "Fine.")
    window = open_window(url)
    assert window.page.locator(".context").is_hidden()
    window.say("Hello")
    window.until_answered()
    prompt = len(engine.requests[0].prompt_ids)
    meter = window.page.locator(".context meter")
    assert meter.get_attribute("max") == "4096"
    assert int(meter.evaluate("(meter) => meter.value")) > prompt


def test_each_view_has_one_first_heading(url: str, open_window: Any) -> None:
    page = open_window(url).page
    for view in ("chat", "status"):
        page.goto(f"{url}/#{view}")
        page.wait_for_selector(f"body[data-view={view}]", state="attached")
        assert page.locator("h1").count() == 1


def test_formulas_and_colours_are_loaded_when_they_are_needed(
    engine: ScriptedEngine, url: str, open_window: Any
) -> None:
    code = "```python\ndef f():\n    return 1\n```"
    formulas = r"\[\int_0^1 \boxed{x} + \mathbb{R} \sqrt{2} \color{red} y\]"
    say_once(engine, "Plain.", f"{formulas}\n\n{code}\n\nEnd \\(x \\]")
    window = open_window(url)
    page = window.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    window.say("Hello")
    window.until_answered()
    assert not [one for one in asked if "katex" in one or "highlight" in one]
    window.say("Again")
    page.wait_for_selector(".katex-display .sqrt svg")
    page.wait_for_selector(".hljs-keyword:text-is('def')")
    wait_for(lambda: any(one.endswith("KaTeX_AMS-Regular.woff2") for one in asked))
    family = "getComputedStyle(document.querySelector('.katex')).fontFamily"
    assert "KaTeX_Main" in page.evaluate(family)
    assert window.text().endswith("End \\(x \\]")


def test_images_are_attached_kept_and_sent_again(
    engine: ScriptedEngine, open_window: Any, tmp_path: Path
) -> None:
    say_once(engine, "A red square.", "Still red.")
    stand_in = StandIn(engine.tokenizer)
    (tmp_path / "red.png").write_bytes(image_file())
    with serve(make_app(engine, preprocessor=stand_in)) as url:
        window = open_window(url)
        page, sent = window.page, sent_by(window.page)
        page.get_by_label("Files to attach").set_input_files([tmp_path / "red.png"])
        page.locator(".files img.thumbnail").wait_for()
        # A picture is dropped, another is pasted.
        for kind, target in (("drop", ".chat"), ("paste", "textarea")):
            page.evaluate(
                """([kind, target, data]) => {
                    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
                    const transfer = new DataTransfer();
                    transfer.items.add(new File([bytes], `${kind}.png`, { type: 'image/png' }));
                    const about = { bubbles: true, cancelable: true };
                    document.querySelector(target).dispatchEvent(kind === 'drop'
                        ? new DragEvent(kind, { ...about, dataTransfer: transfer })
                        : new ClipboardEvent(kind, { ...about, clipboardData: transfer }));
                }""",
                [kind, target, base64_of(image_file())],
            )
            page.locator(".files").get_by_text(f"{kind}.png").wait_for()
        page.get_by_role("button", name="Remove drop.png").click()
        window.say("What is it?")
        window.until_answered()
        part = {"type": "image_url", "image_url": {"url": data_url(image_file())}}
        content = [part, part, {"type": "text", "text": "What is it?"}]
        assert sent[-1]["messages"] == [{"role": "user", "content": content}]
        assert page.locator(".message.user img.thumbnail").count() == 2
        page.reload()
        page.locator(".message.user img.thumbnail").first.wait_for()
        window.say("And now?")
        page.wait_for_selector('.prose p:text-is("Still red.")')
        assert sent[-1]["messages"][0]["content"] == content
        assert [len(request.images) for request in stand_in.requests] == [2, 2]


def test_a_model_of_text_is_not_offered_images(
    engine: ScriptedEngine, url: str, open_window: Any, tmp_path: Path
) -> None:
    (tmp_path / "red.png").write_bytes(image_file())
    page = open_window(url).page
    page.get_by_label("Files to attach").set_input_files([tmp_path / "red.png"])
    page.wait_for_selector(".problem:has-text('red.png is not text')")

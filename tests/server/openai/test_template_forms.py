"""Conversations get the form that a chat template reads; nothing is dropped.

`PIECEWORK_CHAT_TEMPLATES` names a folder with .jinja files of real models for the slow test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from piecework.runtime.tokenizer.chat_template import ChatTemplateError, ChatTemplates
from piecework.runtime.tokenizer.conversation import conversation_text
from piecework.server.anthropic.requests import CountTokensRequest
from piecework.server.anthropic.to_chat import chat_options
from piecework.server.openai.rendering import render_chat
from piecework.server.openai.requests import ChatOptions
from piecework.server.openai.responses.items import InputItem, messages_of
from piecework.server.parsing.choice import choose_format

FOLDER = os.environ.get("PIECEWORK_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).rglob("*.jinja")) if FOLDER else []
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a 城市.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": "How is it?"}
MORE: dict[str, Any] = {"role": "user", "content": "And now?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "All fine."}


def calling(*cities: str, content: str | None = None, cut: str = '"}') -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{city}",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}{cut}'},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def results(*cities: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": f"call_{city}", "content": f"Dry in {city}."}
        for city in cities
    ]


def parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


LOOP = [USER, calling("Bonn"), *results("Bonn")]
SAID = ["How is it?", "weather", "Bonn", "Dry in Bonn."]
CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "system": ([SYSTEM, USER], ["Be brief.", "How is it?"]),
    "loop": (LOOP, SAID),
    "goes on": ([*LOOP, ANSWER, MORE], [*SAID, "All fine.", "And now?"]),
    "interrupted": ([SYSTEM, *LOOP, MORE], ["Be brief.", *SAID, "And now?"]),
    "parallel": (
        [USER, calling("Bonn", "Trier"), *results("Bonn", "Trier"), ANSWER],
        ["How is it?", "Bonn", "Trier", "Dry in Bonn.", "Dry in Trier.", "All fine."],
    ),
    "beside": ([USER, calling("Bonn", content="I look."), *results("Bonn")], ["I look.", *SAID]),
    "cut": ([USER, calling("Bonn", cut=""), *results("Bonn")], SAID),
    "developer": (
        [SYSTEM, {"role": "developer", "content": "Be kind."}, USER, ANSWER],
        ["Be brief.", "Be kind.", "How is it?", "All fine."],
    ),
    "late developer": (
        [SYSTEM, USER, ANSWER, {"role": "developer", "content": "Be kind."}, MORE],
        ["Be brief.", "Be kind.", "How is it?", "All fine.", "And now?"],
    ),
    "parts": (
        [parts("system", "S1.", "S2."), parts("user", "U1.", "U2."), parts("assistant", "A1.")],
        ["S1.", "S2.", "U1.", "U2.", "A1."],
    ),
    "two users": ([USER, MORE], ["How is it?", "And now?"]),
}

_ROLE = "{{ '<' + m.role + '>' }}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}"
)


def _each(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}"


def _required(condition: str) -> str:
    return "{% if " + condition + " %}{{ raise_exception('refused') }}{% endif %}"


PLAIN = _ROLE + "{{ m.content or '' }}"
TEMPLATES = {
    "no tools": _each(_ROLE + "{{ m.content + '' }}"),
    "no system": _each(_required("m.role not in ['user', 'assistant']") + PLAIN),
    "alternates": _each(
        _required("m.role not in ['user', 'assistant']")
        + _required("(m.role == 'user') != (loop.index0 % 2 == 0)")
        + PLAIN
    ),
    "system first": _each(_required("m.role == 'system' and loop.index0") + PLAIN + _CALLS, _TOOLS),
    "one system, not shown later": _each(
        "{% if m.role != 'system' or loop.first %}" + PLAIN + _CALLS + "{% endif %}", _TOOLS
    ),
    "system in the last turn": _each(
        "{% if m.role == 'user' %}{{ (messages[0].content if loop.last else '') + m.content }}"
        "{% elif m.role != 'system' %}" + PLAIN + _CALLS + "{% endif %}",
        _TOOLS,
    ),
    "parts only": _each(
        _ROLE + "{% for p in m.content or [] %}{{ p.text }}{% endfor %}" + _CALLS, _TOOLS
    ),
    "text arguments": _each(
        PLAIN + "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
        "{% endfor %}",
        _TOOLS,
    ),
    "names of results": _each(
        _required("m.role == 'tool' and not m.name") + PLAIN + _CALLS, _TOOLS
    ),
    "ids of nine": _each(
        _required("m.role == 'tool' and m.tool_call_id | length != 9")
        + "{% for c in m.tool_calls or [] %}"
        + _required("c.id | length != 9")
        + "{{ c.id }}{% endfor %}{{ m.tool_call_id }}"
        + PLAIN
        + _CALLS,
        _TOOLS,
    ),
    "one call": _each(_required("(m.tool_calls or []) | length > 1") + PLAIN + _CALLS, _TOOLS),
    "calls or text": _each(
        _ROLE + "{% if m.content is none %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}",
        _TOOLS,
    ),
    "content null": _each(
        "{% if m.tool_calls %}"
        + _required("m.content is not none")
        + "{% endif %}"
        + PLAIN
        + _CALLS,
        _TOOLS,
    ),
    "no results": _each(_required("m.role == 'tool'") + PLAIN + _CALLS, _TOOLS),
    "never mentions tools": _each(PLAIN + _CALLS),
    "descriptions": _each(
        PLAIN + _CALLS,
        "{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}"
        "{{ t.function.name + ': ' + p.description }}{% endfor %}{% endfor %}",
    ),
    "a list of tools": _each(PLAIN + _CALLS, "{% for t in tools %}{{ t | tojson }}{% endfor %}"),
}


def templates(source: str, **more: str) -> ChatTemplates:
    return ChatTemplates({"default": source, **more}, {"bos_token": "<s>", "eos_token": "</s>"})


def prompt(templates: ChatTemplates, *messages: Any, tools: Any = (), **options: Any) -> str:
    body = {"messages": list(messages), "tools": list(tools), **options}
    form = choose_format("auto", templates)
    return render_chat(templates, ChatOptions.model_validate(body), form).text


def faults(source: str, tools: list[Any]) -> list[str]:
    found, chats = [], templates(source)
    for case, (messages, texts) in CASES.items():
        told = [*texts, "weather", "Of a 城市."] if tools else texts
        try:
            text = prompt(chats, *messages, tools=tools)
        except ChatTemplateError as error:
            found.append(f"{case}: {error}")
            continue
        if lost := [each for each in told if each not in text]:
            found.append(f"{case}: lost {lost}")
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["", "tools"])
def test_all_that_a_conversation_says_is_in_the_prompt(name: str, tools: list[Any]) -> None:
    assert faults(TEMPLATES[name], tools) == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_without_a_server_is_written_alike(name: str) -> None:
    """`LLM.chat`, but for calls that a server tells as text."""
    chats, apart = templates(TEMPLATES[name]), set()
    for case, (messages, _) in CASES.items():
        try:
            assert conversation_text(chats, messages) == prompt(chats, *messages), case
        except ChatTemplateError as error:
            assert "does not read tool calls" in str(error)
            apart.add(case)
    calling = {"loop", "goes on", "interrupted", "parallel", "beside", "cut"}
    assert apart in (set(), calling) if "call" not in name else apart <= calling


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"content": "x"}, r"messages\[1\] has no role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[1\].* is not text"),
    ],
)
def test_messages_that_cannot_be_told_are_named(message: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        conversation_text(templates(_each(PLAIN)), [USER, message])


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="PIECEWORK_CHAT_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_that_a_conversation_says_is_in_the_prompt_of_real_templates(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    try:
        templates(source).render([USER], tools=[])
    except ChatTemplateError as error:
        pytest.skip(f"it renders no conversation at all: {error}")
    if "ensure_ascii=True" in source:
        pytest.skip("it escapes characters itself")
    assert faults(source, []) + faults(source, [TOOL]) == []


def test_parts_are_joined_as_the_template_joins_them() -> None:
    body = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    joins = _each(
        _ROLE + body + "{{ p.text }}{{ '' if loop.last else ' / ' }}{% endfor %}{% endif %}"
    )
    assert prompt(templates(joins.replace(" / ", " ")), parts("user", "a", "b")) == "<user>a b"
    assert prompt(templates(joins.replace(" / ", "")), parts("user", "a", "b")) == "<user>ab"
    # A template of strings alone says nothing of parts.
    assert prompt(templates(_each(PLAIN)), parts("user", "a", "b")) == "<user>a\nb"


def test_parts_of_every_api_reach_the_template_as_parts() -> None:
    texts = ["one", "two"]
    item = InputItem.model_validate(
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}
    )
    blocks = [{"type": "text", "text": text} for text in texts]
    body = CountTokensRequest.model_validate({"messages": [{"role": "user", "content": blocks}]})
    (message,) = messages_of([item.kept("msg")], None)
    (other,) = chat_options(body).messages
    assert message == {"role": "user", "content": blocks}
    assert other.for_template() == message


def test_system_and_developer_messages_are_one_message_in_order() -> None:
    messages = [SYSTEM, {"role": "developer", "content": "Be kind."}, USER]
    joined = "<system>Be brief.\n\nBe kind.<user>How is it?"
    assert prompt(templates(TEMPLATES["system first"]), *messages) == joined
    folded = "<user>Be brief.\n\nBe kind.\n\nHow is it?"
    assert prompt(templates(TEMPLATES["alternates"]), *messages) == folded


def test_ids_of_a_call_and_its_result_stay_the_same() -> None:
    messages = [USER, calling("Bonn", "Trier"), *results("Trier", "Bonn")]
    text = prompt(templates(TEMPLATES["ids of nine"]), *messages, tools=[TOOL])
    before, dry = text.split("<assistant>")[0], text.split("<tool>")[1:]
    first, second = before[-18:-9], before[-9:]
    assert first != second
    assert "Trier" in dry[0] and text.split("<tool>")[0].endswith(second)
    assert dry[0].endswith(first)


def test_a_call_of_several_has_its_result_behind_it() -> None:
    messages = [USER, calling("Bonn", "Trier"), *results("Trier", "Bonn"), ANSWER]
    text = prompt(templates(TEMPLATES["one call"]), *messages, tools=[TOOL])
    places = [text.rindex(each) for each in ('"Bonn"', "in Bonn", '"Trier"', "in Trier", "fine")]
    assert places == sorted(places)


def test_tools_that_a_template_never_mentions_are_told_in_the_models_own_format() -> None:
    calls = "{% for c in m.tool_calls or [] %}<|tool_call|>[{{ c.function | tojson }}]{% endfor %}"
    source = templates(_each(PLAIN + calls))
    assert choose_format("auto", source).name == "granite"
    text = prompt(source, USER, tools=[TOOL])
    assert text.startswith("<system>You may call functions")
    assert '<|tool_call|>[{"name": "NAME"' in text and "<tool_call>" not in text


def test_the_template_for_tools_is_read_where_there_are_tools() -> None:
    source = templates(TEMPLATES["no tools"], tool_use="T" + TEMPLATES["system first"])
    text = prompt(source, *LOOP, tools=[TOOL])
    assert text.startswith('T[{"type"') and '"arguments": {"city": "Bonn"}' in text
    assert prompt(source, USER) == "<user>How is it?"


def test_an_answer_that_was_cut_within_its_thought_can_be_sent_back() -> None:
    cut = {"role": "assistant", "content": None, "reasoning_content": "Let me"}
    assert prompt(templates(_each(PLAIN)), USER, cut, MORE).endswith("<user>And now?")


def test_a_message_in_parts_is_continued() -> None:
    begun = parts("assistant", "All")
    text = prompt(
        templates(TEMPLATES["parts only"]), USER, begun, continue_final_message=True, tools=[TOOL]
    )
    assert text.endswith("<assistant>All")

"""Thoughts are read out of texts however these come in pieces; grammars begin behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from small_templates import templates

from piecework.runtime.sampling import grammar
from piecework.server.parsing.catalog import formats, reasoning_formats
from piecework.server.parsing.choice import choose_reasoning
from piecework.server.parsing.events import CallBegins, Event, Parser, PlainText, Text, Thought
from piecework.server.parsing.reasoning import ReasoningFormat
from piecework.server.parsing.tool_calls import CallRules, Tool

THINK = reasoning_formats()["think"]


def read(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    """Events, neighbours of one kind joined."""
    events: list[Event] = []
    for event in [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]:
        if events and type(event) is type(events[-1]) and isinstance(event, Text | Thought):
            events[-1] = type(event)(events[-1][0] + event[0])
        else:
            events.append(event)
    return events


TEXTS: dict[str, tuple[bool, str, list[Event]]] = {
    "a thought": (
        False,
        "<think>\nHm, a.\n\n</think>\n\nIt is.",
        [Thought("Hm, a."), Text("It is.")],
    ),
    "opened by the template": (True, "Hm.\n</think>\n\nYes", [Thought("Hm."), Text("Yes")]),
    "opened twice": (True, "<think>Hm.</think>Yes", [Thought("Hm."), Text("Yes")]),
    "none": (False, "  Yes <think> no", [Text("  Yes <think> no")]),
    "empty": (False, "<think>\n\n</think>\n\nYes", [Text("Yes")]),
    "never ends": (True, "Hm </thin", [Thought("Hm </thin")]),
    "a mark within": (True, "a </ think> b</think>c", [Thought("a </ think> b"), Text("c")]),
    "ends in the mark": (False, "<thi", [Text("<thi")]),
    "nothing": (True, "", []),
}


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cut_anywhere(kind: str, data: st.DataObject) -> None:
    is_open, text, events = TEXTS[kind]
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    places = sorted({0, len(text), *cuts})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert read(THINK.parser(PlainText(), is_open=is_open), pieces) == events


def test_a_call_in_a_thought_is_a_thought() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    parser = THINK.parser(formats()["hermes"].parser([Tool("add", "", {})]), is_open=False)
    events = read(parser, [f"<think>{call}</think>{call}"])
    assert [type(event).__name__ for event in events] == ["Thought", "CallBegins", "Arguments"]


@pytest.mark.parametrize(
    ("is_open", "text", "follows"),
    [
        (True, 'Say {"a": x}.</think>\n\n{"a": 1}', True),
        (True, '{"a": 1}', False),
        (False, '<think>Hm.</think>{"a": 1}', True),
        (False, '{"a": 1}', True),
        (False, '<think>Hm.</think>{"a": "b"}', False),
        (False, 'Hm. {"a": 1}', False),
    ],
)
def test_grammars_begin_behind_the_thought(is_open: bool, text: str, follows: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    whole = THINK.grammar(grammar.from_json_schema(schema), is_open=is_open)
    matcher = LLMatcher(LLTokenizer("byte"), whole, log_level=0)
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) is follows


@pytest.mark.parametrize(
    "body",
    [
        grammar.from_regex("[ab]+"),
        grammar.from_choice(["ab", "b"]),
        grammar.from_ebnf('root ::= "a" tail\ntail ::= "b"'),
        grammar.from_structural_tag([("<f>", {"type": "object"}, "</f>")], ["<f"]),
    ],
)
def test_any_grammar_follows_a_thought(body: str) -> None:
    matcher = LLMatcher(LLTokenizer("byte"), THINK.grammar(body, is_open=True), log_level=0)
    assert matcher.consume_tokens(list(b"hm</think>ab")) and matcher.is_accepting()
    assert json.loads(THINK.grammar(body, is_open=True))["grammars"][1]["name"] == "body"


def test_names() -> None:
    answer = "{{ each.content.split('</think>')[-1] }}"
    left_out = templates("{% for each in messages %}" + answer + "{% endfor %}")
    assert choose_reasoning("auto", templates("{{ messages }}")) is None
    assert choose_reasoning("auto", left_out) == THINK
    assert choose_reasoning("deepseek_r1", None) == THINK
    assert choose_reasoning("none", left_out) is None
    with pytest.raises(ValueError, match="--reasoning-parser must be auto, none or one of think"):
        choose_reasoning("qwen7", None)


_CALL = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"
RECORDED: dict[str, tuple[str, bool, str, list[str]]] = {
    "mistral": ("mistral", False, "[THINK]Hm.[/THINK]Yes", ["Hm.", "Yes"]),
    "kimi": ("kimi", False, "◁think▷Hm.◁/think▷Yes", ["Hm.", "Yes"]),
    "seed": ("seed_oss", False, "<seed:think>\nHm.</seed:think>Yes", ["Hm.", "Yes"]),
    "granite": (
        "granite",
        False,
        "Here is my thought process:\nHm.\n\nHere is my response:\nYes",
        ["Hm.", "Yes"],
    ),
    "gemma": ("gemma4", False, "<|channel>thought\nHm.<channel|>Yes", ["Hm.", "Yes"]),
    "channels": (
        "gpt_oss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        ["Hm.", "Yes"],
    ),
    "open": (
        "gpt_oss",
        True,
        "Hm. <| a<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        ["Hm. <| a", "Yes"],
    ),
    "no end": ("gpt_oss", False, "<|channel|>analysis<|message|>Hm.<|en", ["Hm.<|en"]),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_thoughts_cut_anywhere(kind: str) -> None:
    name, is_open, text, (thought, *said) = RECORDED[kind]
    form = reasoning_formats()[name]
    wanted = [Thought(thought), *map(Text, said)]
    assert read(form.parser(PlainText(), is_open=is_open), list(text)) == wanted
    for cut in range(len(text)):
        parser = form.parser(PlainText(), is_open=is_open)
        assert read(parser, [text[:cut], text[cut:]]) == wanted


def test_a_call_behind_a_thought_in_channels() -> None:
    rest = formats()["openai"].parser([Tool("add", "", {})])
    parser = reasoning_formats()["gpt_oss"].parser(rest, is_open=False)
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{_CALL}<|call|>"
    assert read(parser, list(text))[:2] == [Thought("Hm."), CallBegins("add")]


@pytest.mark.parametrize(
    ("has_calls", "text"),
    [
        (True, f"Hm.<|end|>{_CALL}"),
        (False, "Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}"),
    ],
)
def test_grammars_begin_in_their_channel(has_calls: bool, text: str) -> None:
    form, tool = reasoning_formats()["gpt_oss"], Tool("add", "", {"additionalProperties": False})
    body = grammar.from_json_schema({"type": "object", "maxProperties": 0})
    if has_calls:
        body = formats()["openai"].grammar([tool], CallRules(required=True))
    for is_open, begins in ((True, ""), (False, "<|channel|>analysis<|message|>")):
        whole = form.grammar(body, is_open=is_open, has_calls=has_calls)
        matcher = LLMatcher(LLTokenizer("byte"), whole, log_level=0)
        assert matcher.consume_tokens(list((begins + text).encode())) and matcher.is_accepting()


AROUND = [form for form in reasoning_formats().values() if form.around]


@pytest.mark.parametrize("form", AROUND, ids=lambda form: form.name)
def test_marks_around_an_answer_are_no_part_of_it(form: ReasoningFormat) -> None:
    for before, behind in form.around:
        text = f"{form.opening}Hm.{form.closing}{before}\nYes, [I] <do>.\n{behind}"
        for cut in range(len(text)):
            parser = form.parser(PlainText(), is_open=False)
            events = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
            thought = "".join(event.text for event in events if isinstance(event, Thought))
            said = "".join(event.text for event in events if isinstance(event, Text))
            assert thought == "Hm."
            assert said.strip() == "Yes, [I] <do>."
            assert said == said.rstrip() or not behind


@pytest.mark.parametrize("form", AROUND, ids=lambda form: form.name)
def test_grammars_allow_the_marks_around_an_answer(form: ReasoningFormat) -> None:
    body = grammar.from_lark('start: "{}"')
    special = {mark: 300 + index for index, mark in enumerate(form.marks)}
    for ids in ({}, special):
        for before, behind in form.around:
            for text in (f"Hm.{form.closing}{before}{{}}{behind}", f"Hm.{form.closing}{{}}"):
                lark = form.grammar(body, is_open=True, special=ids)
                matcher = grammar.compiled(grammar._bytes(9), lark)
                tokens = _tokens(text, ids)
                assert matcher.try_consume_tokens(tokens) == len(tokens), text
                assert matcher.is_accepting()


def _tokens(text: str, special: Mapping[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), None)
        ids += [special[mark]] if mark else list(text[0].encode())
        text = text[len(mark or text[0]) :]
    return ids

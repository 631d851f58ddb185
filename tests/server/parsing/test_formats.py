"""What each format of tool calls has in common: calls are read however the text is cut, and texts
that follow its grammar are read back with arguments of their schemas.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from itertools import islice

import jsonschema
import pytest
from call_samples import ODD
from examples import examples
from grammar_walks import Walk
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_calls import RECORDED, SCHEMA, TOOLS, Said

from piecework.runtime.sampling import grammar
from piecework.server.parsing.catalog import formats, reasoning_formats
from piecework.server.parsing.events import Arguments, CallBegins, Event, Text, Thought
from piecework.server.parsing.tool_calls import Call, CallRules, Tool, ToolCallFormat

FIRST_ID = 300
"""Of special tokens, in the vocabulary that grammars are walked with."""


def said(events: Sequence[Event]) -> Said:
    """Neighbours joined, arguments read; those that are cut off stay text."""
    found: Said = []
    calls: list[list[str]] = []
    for event in events:
        match event:
            case CallBegins(name):
                calls.append([name])
                found.append((name, calls[-1]))
            case Arguments(text):
                calls[-1].append(text)
            case Text(text):
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case Thought(text):
                found.append(("thought", ["", json.dumps(text)]))
    return [one if isinstance(one, str) else (one[0], _value("".join(one[1][1:]))) for one in found]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read(form: ToolCallFormat, pieces: Sequence[str]) -> Said:
    parser = form.parser(TOOLS)
    return said([event for piece in pieces for event in parser.push(piece)] + parser.finish())


CASES = [
    pytest.param(name, text, expected, id=f"{name}-{index}")
    for name, texts in RECORDED.items()
    for index, (text, expected) in enumerate(texts)
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str, expected: Said) -> None:
    form = formats()[name]
    assert read(form, [text]) == expected
    assert read(form, text) == expected
    for cut in range(len(text)):
        assert read(form, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", RECORDED)
def test_half_a_call_is_the_beginning_of_one(name: str) -> None:
    """Wherever the text ends: a call of a name that it knows, or text; arguments that begin as the
    whole ones do.
    """
    form = formats()[name]
    text, expected = RECORDED[name][0]
    for end in range(len(text)):
        parser = form.parser(TOOLS)
        events = [*parser.push(text[:end]), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallBegins)]
        assert names == [one[0] for one in expected if isinstance(one, tuple)][: len(names)]
        assert all(isinstance(event, Text) for event in events) or names


PIECES = (
    *("{", "}", "[", "]", "(", '"', ",", ":", " ", "\n", "x", "\0", "1e999", "NaN", "b''", "{1}"),
    *('{"name": []}', '{"name": "weather", "arguments": ', '{"arguments": {}, "name": "now"}\n'),
    *("weather", "now", "commentary", "to=functions.now", "json", "functions.now:0", "call:now{"),
    *("[now()]", "city", "='a'", ":5", "```json\n", "<parameter=city>", "<function=weather>"),
)


@settings(max_examples=examples(10, exploring=60), deadline=None)
@given(data=st.data(), thinks=st.sampled_from(("", "gpt_oss", "think")))
@pytest.mark.parametrize("name", formats())
def test_any_text_reads_the_same_in_pieces(name: str, data: st.DataObject, thinks: str) -> None:
    form = formats()[name]
    thought = reasoning_formats().get(thinks)
    marks = form.marks + (thought.marks if thought else ())
    halves = tuple(mark[: len(mark) // 2] for mark in marks)
    parts = data.draw(st.lists(st.sampled_from(marks * 3 + halves + PIECES), max_size=10))
    is_open = data.draw(st.booleans())

    def events(pieces: Sequence[str]) -> tuple[str, Said]:
        parser = form.parser(TOOLS)
        if thought is not None:
            parser = thought.parser(parser, is_open=is_open)
        told = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        thoughts = [event.text for event in told if isinstance(event, Thought)]
        return "".join(thoughts), said([each for each in told if not isinstance(each, Thought)])

    text = "".join(parts)
    assert events([text]) == events(text) == events(parts)


EACH_PARSER = ("hermes", "glm45", "pythonic", "openai", "mistral_args")
"""One format for each parser; other formats give them other marks."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in EACH_PARSER))
        for name in formats()
    ],
)
def test_a_whole_text_of_marks_takes_no_longer_than_its_pieces(name: str) -> None:
    form = formats()[name]
    piece = "".join(form.marks) or "[{"
    pieces = [piece] * (300_000 // len(piece))

    def seconds(pieces: Sequence[str]) -> float:
        # Collections of what other tests have left would take longer than the parser.
        gc.disable()
        began = time.process_time()
        try:
            read(form, pieces)
            return time.process_time() - began
        finally:
            gc.enable()

    assert seconds(["".join(pieces)]) < 2 * seconds(pieces) + 0.2


def test_a_call_that_the_model_begins_without_its_mark_is_read() -> None:
    text = "Now.\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>"
    for ending in ("", "\n</tool_call>"):
        found = read(formats()["qwen3_coder"], text + ending)
        assert found == ["Now.", ("weather", {"city": "Bonn"})]
    assert read(formats()["qwen3_coder"], "<function=other>") == ["<function=other>"]


def test_every_format_is_recorded() -> None:
    assert set(RECORDED) == set(formats()) - {"generic"}


@pytest.mark.parametrize("name", formats())
def test_calls_that_a_format_writes_are_read_back(name: str) -> None:
    form = formats()[name]
    for calls in ([("weather", ODD), ("now", {})], [("weather", {"city": "NAME's", "days": -1})]):
        text = form.written([Call(name, arguments) for name, arguments in calls])
        assert read(form, [text]) == calls


@pytest.mark.parametrize(
    ("name", "blank"), [("jamba", "\n    "), ("mistral", " "), ("granite", "")]
)
def test_blanks_around_the_bracket_of_a_list_may_be_those_of_a_template(
    name: str, blank: str
) -> None:
    form = formats()[name]
    call = '{"name": "now", "arguments": {}}'
    text = f"{form.marks[0]}{blank}[{blank}{call},{blank}{call}{blank}]"
    text += "</tool_calls>" * (name == "jamba")
    lark = grammar.from_lark(form.grammar(TOOLS, CallRules(required=True)))
    matcher = grammar.compiled(grammar._bytes(), lark)
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    assert matcher.is_accepting() and read(form, [text]) == [("now", {}), ("now", {})]


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", RECORDED)
def test_texts_of_the_grammar_are_calls_that_validate(name: str, is_special: bool) -> None:
    form = formats()[name]
    special = (
        {mark: FIRST_ID + index for index, mark in enumerate(form.marks)} if is_special else {}
    )
    walk = Walk(form.grammar(TOOLS, CallRules(required=True, special=special)), special)
    texts = (text for seed in range(60) if (text := walk.text(seed)) is not None)
    ended = list(islice(texts, 4))
    assert len(ended) > 3
    for text in ended:
        calls = read(form, [text])
        assert calls and not any(isinstance(call, str) for call in calls), text
        for tool, arguments in calls:  # type: ignore[misc]
            jsonschema.validate(arguments, SCHEMA if tool == "weather" else {"maxProperties": 0})


@pytest.mark.parametrize("name", RECORDED)
def test_free_text_with_calls_follows_the_grammar_of_auto(name: str) -> None:
    form = formats()[name]
    lark = grammar.from_lark(form.grammar(TOOLS, CallRules()))
    text, _ = RECORDED[name][0]
    text, free = text.removesuffix("<|call|>"), "No call."
    if name == "openai":
        free = f"<|channel|>final<|message|>{free}"
    for each, follows in ((text, True), (text.replace("7", "777"), False), (free, True)):
        matcher = grammar.compiled(grammar._bytes(), lark)
        taken = matcher.try_consume_tokens(list(each.encode()))
        assert (taken == len(each.encode()) and matcher.is_accepting()) is follows, each


NAMES = st.one_of(
    st.sampled_from(
        ["城市", "filter[name]", "uids[]", "$top", "a b", "a.b-c", "x:y", "class", "名 前"]
    ),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
)
VALUES: dict[str, object] = {
    "integer": {"type": "integer"},
    "text": {"type": "string", "maxLength": 3},
    "either": {"type": ["string", "null"], "maxLength": 2},
    "list": {"type": "array", "items": {"enum": ["</parameter>", "<escape>", 1]}, "maxItems": 2},
}


@settings(max_examples=examples(10, exploring=60), deadline=None)
@given(keys=st.lists(NAMES, min_size=1, max_size=3, unique=True), data=st.data())
@pytest.mark.parametrize("name", (*EACH_PARSER, "qwen3_coder", "gemma4"))
def test_every_name_that_the_grammar_writes_is_read(
    name: str, keys: list[str], data: st.DataObject
) -> None:
    form = formats()[name]
    kinds = [data.draw(st.sampled_from(sorted(VALUES))) for _ in keys]
    properties = {key: VALUES[kind] for key, kind in zip(keys, kinds, strict=True)}
    schema = {"type": "object", "properties": properties, "required": keys}
    tool = Tool("f", "", schema)
    try:
        lark = form.grammar([tool], CallRules(required=True, parallel=False))
    except ValueError as error:
        assert "rename the parameter" in str(error) and not set(keys) <= {"城市", "$top", "a b"}
        return
    text = Walk(lark).text(data.draw(st.integers(0, 999)))
    if text is None:
        return
    parser = form.parser([tool])
    (call,) = said([*parser.push(text), *parser.finish()])
    assert isinstance(call, tuple), text
    jsonschema.validate(call[1], {**schema, "additionalProperties": False})

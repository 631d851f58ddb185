"""Calls are read out of texts however these come in pieces, and what is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise

import jsonschema
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from piecework import LLM, SamplingParams
from piecework.runtime.sampling import grammar
from piecework.server.parsing.catalog import formats, reasoning_formats
from piecework.server.parsing.choice import choose_format
from piecework.server.parsing.events import Arguments, CallBegins, Event, Text
from piecework.server.parsing.in_text import tools_in_text, turns_in_text
from piecework.server.parsing.tool_calls import CallRules, Tool

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER, ADD = Tool("weather", "of a city", SCHEMA), Tool("add", "", {"type": "object"})
HERMES = formats()["hermes"]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


RECORDED: dict[str, tuple[str, list[Event]]] = {
    "one": (
        call("weather", '{"city": "Bonn"}'),
        [CallBegins("weather"), Arguments('{"city": "Bonn"}')],
    ),
    "text before": (
        "Let me see.\n\n" + call("add", "{}") + "\n",
        [Text("Let me see."), CallBegins("add"), Arguments("{}")],
    ),
    "two": (
        call("add", '{"a": [1, {"b": 2}]}')
        + "\n"
        + call("weather", '{"city": "}\\"</tool_call>"}'),
        [
            CallBegins("add"),
            Arguments('{"a": [1, {"b": 2}]}'),
            CallBegins("weather"),
            Arguments('{"city": "}\\"</tool_call>"}'),
        ],
    ),
    "text between": (
        call("add", "{}") + " and then " + call("add", "{}"),
        [CallBegins("add"), Arguments("{}"), Text(" and then"), CallBegins("add"), Arguments("{}")],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": "ü"}, "name": "add"}</tool_call>',
        [CallBegins("add"), Arguments('{"a": "ü"}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [CallBegins("add"), Arguments('{"a": 1}')],
    ),
    "without its end": (
        call("add", "{}").removesuffix("\n</tool_call>"),
        [CallBegins("add"), Arguments("{}")],
    ),
    "half a call": (
        '<tool_call>\n{"name": "add", "arguments": {"a": ',
        [CallBegins("add"), Arguments('{"a": ')],
    ),
    "no name yet": ('Well: <tool_call>\n{"na', [Text('Well: <tool_call>\n{"na')]),
    "unknown": (call("rm", "{}") + "!", [Text(call("rm", "{}") + "!")]),
    "a name that is none": (
        '<tool_call>{"arguments": {}, "name": []}</tool_call>',
        [Text('<tool_call>{"arguments": {}, "name": []}</tool_call>')],
    ),
    "white space behind text behind a call": (
        call("add", "{}") + " and so\n",
        [CallBegins("add"), Arguments("{}"), Text(" and so")],
    ),
    "no JSON": ("a <tool_call> b </tool_call> c", [Text("a <tool_call> b </tool_call> c")]),
    "marks alone": ("1 < 2 <tool 3 </tool_call> \n", [Text("1 < 2 <tool 3 </tool_call> \n")]),
}


def joined(events: list[Event]) -> list[Event]:
    """Pieces of one text, and of one call's arguments, as one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(last.text + event.text)
        else:
            found.append(event)
    return found


def read(*pieces: str) -> list[Event]:
    parser = HERMES.parser([WEATHER, ADD])
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_texts_cut_anywhere(name: str) -> None:
    text, expected = RECORDED[name]
    assert read(text) == expected
    assert read(*text) == expected
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == expected


@settings(max_examples=examples(80, exploring=200))
@given(
    parts=st.lists(
        st.sampled_from(
            (
                *("<tool_call>", "</tool_call>", '{"name": "add", ', '"arguments": '),
                *("{", "}", '"', "\n"),
            )
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 120), max_size=4),
)
def test_any_text_reads_the_same_in_pieces(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert read(*(text[begin:end] for begin, end in pairwise(places))) == read(text)


def test_a_long_text_behind_a_mark_is_not_held_back_for_ever() -> None:
    parser = HERMES.parser([ADD])
    events = [event for _ in range(100) for event in parser.push("<tool_call>" + "x" * 100)]
    assert sum(len(event.text) for event in events if isinstance(event, Text)) > 5000


def test_calls_with_arguments_first_are_read_however_much_follows() -> None:
    text = '<tool_call>{"arguments": {}, "name": "add"}</tool_call>\n' * 200
    assert read(text) == read(*text) == [CallBegins("add"), Arguments("{}")] * 200


def test_names_that_there_are_not() -> None:
    assert choose_format("auto", None).name == "generic"
    assert choose_format("hermes", None).name == "hermes"
    with pytest.raises(ValueError, match=r"--tool-call-parser must be auto or one of .*hermes, "):
        choose_format("nonsense", None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = make_tiny_model(tmp_path_factory.mktemp("tools") / "model")
    return LLM(str(model), dtype="float32", num_threads=1)


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_validate_at_any_temperature(llm: LLM, parallel: bool) -> None:
    lark = HERMES.grammar([WEATHER], CallRules(required=True, parallel=parallel))
    params = [
        SamplingParams(
            max_new_tokens=300, temperature=2.0, seed=seed, grammar=grammar.from_lark(lark)
        )
        for seed in range(8)
    ]
    ended = 0
    for completion in llm.generate(["Call:"] * len(params), params):
        events = read(completion.text)
        assert not any(isinstance(event, Text) for event in events)
        if completion.finish_reason == "stop":
            ended += 1
            calls = [event.text for event in events if isinstance(event, Arguments)]
            assert len(calls) == 1 or parallel
            for arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMA)
    assert ended


def test_free_text_turns_into_a_call_at_its_mark(llm: LLM) -> None:
    """A model that begins a call, as one that was trained does, must end it by its schema."""
    lark = HERMES.grammar([WEATHER], CallRules())
    begun = llm.tokenizer.encode("Well. <tool_call>")
    matcher = llm.core.grammars.matcher(grammar.from_lark(lark))  # type: ignore[union-attr]
    matcher.accept(begun)
    assert matcher.fault is None and not matcher.is_finished
    forced = llm.tokenizer.decode(matcher.forced())
    assert forced.startswith('\n{"name": "weather", "arguments": {')


@pytest.mark.parametrize("parallel", [False, True])
def test_no_call_behind_the_only_one_is_free_text(llm: LLM, parallel: bool) -> None:
    lark = HERMES.grammar([WEATHER], CallRules(parallel=parallel))
    matcher = llm.core.grammars.matcher(grammar.from_lark(lark))  # type: ignore[union-attr]
    whole = call("weather", '{"city": "Bonn", "days": 1}')
    matcher.accept(llm.tokenizer.encode("Well. " + whole))
    assert matcher.fault is None and matcher.is_finished is not parallel
    matcher.accept(llm.tokenizer.encode(" And <tool_call>\nno call"))
    assert matcher.fault is not None


def test_an_answer_is_a_call_or_json(llm: LLM) -> None:
    content = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    lark = HERMES.grammar([WEATHER], CallRules(parallel=False, content=content))
    params = [
        SamplingParams(
            max_new_tokens=300, temperature=5.0, seed=seed, grammar=grammar.from_lark(lark)
        )
        for seed in range(8)
    ]
    kinds = set()
    for completion in llm.generate(["Go:"] * len(params), params):
        if completion.finish_reason == "stop":
            (first, *_) = read(completion.text)
            kinds.add(type(first))
            if isinstance(first, Text):
                jsonschema.validate(json.loads(first.text), content)
    assert kinds <= {Text, CallBegins} and kinds


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_thought_of_bounded_length_is_followed_by_its_grammar(
    llm: LLM, logprobs: int | None
) -> None:
    form = reasoning_formats()["think"]
    schema = {"enum": [{"a": 1}, {"b": 2}]}
    params = SamplingParams(
        max_new_tokens=80,
        temperature=1.0,
        seed=1,
        logprobs=logprobs,
        grammar=form.grammar(grammar.from_json_schema(schema), is_open=True),
        **form.budget(llm.tokenizer, 5, is_open=True),
    )
    (completion,) = llm.generate(["Think:"], params)
    thought, _, answer = completion.text.partition("</think>")
    # Of a character that is half told the rest comes before.
    assert thought and completion.token_ids[5:].index(params.thought_end_ids[0]) <= 3
    jsonschema.validate(json.loads(answer), schema)


def test_a_mark_that_the_grammar_forces_begins_a_bounded_thought(llm: LLM) -> None:
    form = reasoning_formats()["think"]
    body = form.grammar(grammar.from_json_schema({"enum": [{"a": 1}]}), is_open=False)
    closed = form.budget(llm.tokenizer, 5, is_open=False)
    begin = closed["thought_begin_ids"]
    assert len(begin) > 1
    params = SamplingParams(
        max_new_tokens=80, temperature=1.0, logit_bias={begin[0]: 100.0}, grammar=body, **closed
    )
    (completion,) = llm.generate(["Think:"], params)
    assert completion.text.startswith("<think><<<<<</think>")


def test_models_without_tools_are_told_in_words() -> None:
    generic = formats()["generic"]
    function = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    tool = ADD._replace(description="加法")
    system, told, user, called, result = turns_in_text(
        generic, tools_in_text(generic, messages, [tool])
    )
    assert (system, user) == (messages[0], messages[1])
    assert '"name": "add", "description": "加法"' in told["content"]
    assert read(called["content"]) == [CallBegins("add"), Arguments('{"a": 1}')]
    assert "tool_calls" not in called
    assert (result["role"], "2" in result["content"]) == ("user", True)

"""Arguments that are bare text become JSON by their schemas, which the grammar holds them to."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from grammar_walks import Walk

from piecework.runtime.sampling import grammar
from piecework.server.parsing.catalog import formats
from piecework.server.parsing.events import Arguments
from piecework.server.parsing.tool_calls import CallRules, Tool
from piecework.server.parsing.typed_values import KINDS, kinds_of, read_value

FORM = formats()["qwen3_coder"]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
DEFINITIONS = {
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "word": {"type": "string", "minLength": 1, "maxLength": 4},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "words": {"enum": ["a b", "</param", "true", ""]},
    "one word": {"const": "Ü\n"},
    "several kinds": {"enum": ["a", 1, None, False, "b"]},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}/[0-9]$", "maxLength": 9},
    "groups": {"type": "string", "pattern": "^(ab|c|\\$d)$"},
    "searched": {"type": "string", "pattern": "x[0-9]", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "date and time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "address": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    "number": {"type": "number", "minimum": -2, "maximum": 2.5},
    "yes or no": {"type": "boolean"},
    "or null": {"type": ["string", "null"], "maxLength": 4},
    "any of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 10}]},
    "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    "definition": {"$ref": "#/$defs/point"},
    "definition of text": {"$ref": "#/$defs/word"},
    "deep": {"type": "object", "properties": {"a": {"$ref": "#/$defs/point"}}},
    "another argument": {"anyOf": [{"$ref": "#/properties/b"}, {"type": "null"}]},
    "whole": {"type": "object", "properties": {"c": {"$ref": "#"}}},
    "any of any of": {"anyOf": [{"anyOf": [{"const": "x"}, {"type": "null"}]}, {"const": 3}]},
    "all of": {"allOf": [{"$ref": "#/$defs/word"}, {"pattern": "^[a-z]*$"}]},
    "closing tags in JSON": {"type": "array", "items": {"enum": ["</parameter>", "]"]}},
    "hostname": {"type": "string", "format": "hostname"},
    "uri": {"type": "string", "format": "uri"},
    "duration": {"type": "string", "format": "duration"},
    "ipv6": {"type": "string", "format": "ipv6"},
}


def tool(schema: Any, strict: bool = False, **more: Any) -> Tool:
    properties = {"a": schema, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"], **more}
    return Tool("f", "", {"$defs": DEFINITIONS, **parameters}, strict)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_texts_of_the_grammar_are_values_of_the_schema(kind: str) -> None:
    called = tool(SCHEMAS[kind])
    walk = Walk(FORM.grammar([called], CallRules(required=True, parallel=False)))
    texts = [text for seed in range(8) if (text := walk.text(seed)) is not None]
    assert texts
    for text in texts:
        parser = FORM.parser([called])
        events = [*parser.push(text), *parser.finish()]
        arguments = "".join(event.text for event in events if isinstance(event, Arguments))
        jsonschema.validate(json.loads(arguments), called.parameters, format_checker=CHECKER)


@pytest.mark.parametrize("least", [0, 1])
def test_a_string_between_special_tokens_is_as_long_as_it_must_be(least: int) -> None:
    form = formats()["gemma4"]
    special = {mark: 300 + number for number, mark in enumerate(form.marks)}
    called = tool({"type": "string", "minLength": least, "maxLength": 3})
    lark = form.grammar([called], CallRules(required=True, special=special))
    text = grammar.from_lark(lark, list(special.values()))
    matcher = grammar.Matcher(grammar.compiled(grammar._bytes(9), text))
    quote = special['<|"|>']
    matcher.accept([special["<|tool_call>"], *b"call:f{a:", quote])
    assert matcher.takes([quote]) == (least == 0) and matcher.takes([*b"x", quote])


UNHELD = [
    ("format", {"type": "string", "format": "iri-reference"}, {}),
    ("pattern", {"type": "string", "pattern": "^a|b$"}, {}),
    ("pattern", {"type": "string", "pattern": "(?=a)"}, {}),
    ("not", {"not": {"type": "string"}}, {}),
    ("maxLength", {"anyOf": [{"type": "string", "maxLength": 2}], "maxLength": 3}, {}),
    ("minProperties", {"type": "integer"}, {"minProperties": 1}),
    ("anyOf", {"type": "integer"}, {"anyOf": [{"required": ["a"]}]}),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "string"}}, {}),
    ("$ref", {"$ref": "#/$defs/nothing"}, {}),
]


@pytest.mark.parametrize(("keyword", "schema", "more"), UNHELD)
def test_a_keyword_that_text_cannot_be_held_to_is_named_or_ignored(
    keyword: str, schema: Any, more: Any
) -> None:
    with pytest.raises(ValueError, match=f'(?s)function .f.: .*"{re.escape(keyword)}"'):
        FORM.grammar([tool(schema, True, **more)], CallRules(required=True))
    grammar.from_lark(FORM.grammar([tool(schema, **more)], CallRules(required=True)))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" 007 ", {"type": "string"}, " 007 "),
        ("7", {"type": "integer"}, 7),
        ("7", {}, 7),
        ("7", {"type": ["string", "boolean"]}, "7"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{a", {"type": "object"}, "{a"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_what_a_text_means_is_said_by_the_schema(text: str, schema: Any, value: Any) -> None:
    assert json.loads(read_value(text, kinds_of(schema, schema))) == value


@pytest.mark.parametrize("schema", [{"type": 5}, {"type": [[]]}, {"enum": 1}, {"anyOf": 2}, 7, []])
def test_what_is_no_schema_allows_all_or_nothing(schema: Any) -> None:
    assert kinds_of(schema, {}) in (KINDS, frozenset())


def test_references_that_go_round_end() -> None:
    schema: dict[str, Any] = {"$ref": "#", "anyOf": [{"$ref": "#"}]}
    assert kinds_of(schema, schema) == KINDS
    nested: dict[str, Any] = {"anyOf": [{"$ref": "#/x"}] * 2000}
    assert kinds_of(nested, {"x": nested}) == KINDS
    wide = tool({"anyOf": [{"type": "string"}, {"$ref": "#/properties/a"}] * 20})
    grammar.from_lark(FORM.grammar([wide], CallRules()))

"""JSON schemas of real clients become grammars; what cannot be followed is ignored or named."""

from __future__ import annotations

import json
import logging
from typing import Any

import jsonschema
import pytest
from grammar_walks import Walk
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.sampling import grammar, json_schema
from piecework.runtime.sampling.json_schema import held_schema

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
KEYED = {
    "type": "object",
    "propertyNames": {"enum": ["a", "b"]},
    "additionalProperties": {"type": "integer"},
}
NOT_HELD: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "format": {"type": "string", "format": "path"},
    "pattern": {"type": "string", "format": "email", "pattern": EMAIL},
    "propertyNames": KEYED,
    "not": {"not": {"type": "string"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "patternProperties": {"type": "object", "patternProperties": {"(?=a)": {}}},
    "type": {"type": "any"},
    "minLength": {"type": "string", "minLength": "3"},
    "$ref": {"$ref": "#/$defs/gone"},
    "enum": {"enum": []},
    "items": {"type": "array", "items": 3},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}
"""By the keyword that grammars do not know, or that is used wrongly."""
SAYS_NOTHING: list[dict[str, Any]] = [
    {"readOnly": True, "nullable": True, "example": "x", "contentEncoding": "base64"},
    {"x-order": 1, "propertyOrdering": ["a"], "discriminator": {"propertyName": "a"}},
    {"properties": None, "items": None, "required": None, "format": None, "enum": None},
    {"uniqueItems": False, "$comment": "c", "deprecated": True, "not": None},
]


def lark(schema: Any, **kwargs: Any) -> str:
    return f"start: %json {json.dumps(held_schema(schema, whose='it', **kwargs))}"


@pytest.mark.parametrize("keyword", NOT_HELD)
def test_an_unknown_keyword_is_named_if_strict_and_else_ignored(
    keyword: str, caplog: pytest.LogCaptureFixture
) -> None:
    json_schema._logged.clear()
    nested = {"type": "object", "properties": {"a": NOT_HELD[keyword]}}
    with pytest.raises(ValueError, match=rf'it: the keyword "{keyword.replace("$", ".")}" \(at /'):
        lark(nested, strict=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            grammar.from_lark(lark(nested, root=True))
    assert len([each for each in caplog.records if f'"{keyword}"' in each.getMessage()]) == 1


@pytest.mark.parametrize("more", SAYS_NOTHING)
def test_annotations_and_null_change_nothing(more: dict[str, Any]) -> None:
    schema = {"type": "string", "minLength": 2}
    assert lark({**schema, **more}, strict=True) == lark(schema, strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    ],
)
def test_what_the_library_approximates_is_followed_where_it_is_not_strict(schema: Any) -> None:
    grammar.from_json_schema(schema, strict=False)
    with pytest.raises(ValueError, match=r"oneOf|maxProperties") as told:
        grammar.from_json_schema(schema)
    assert "llguidance" not in str(told.value) and "start:" not in str(told.value)


def follows(schema: Any, value: Any, **kwargs: Any) -> bool:
    text = json.dumps(value).encode()
    matcher = grammar.compiled(grammar._bytes(), grammar.from_lark(lark(schema, **kwargs)))
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


PARTS = {"$defs": {"A": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("schema", "value", "closed"),
    [
        ({"properties": {"a": {}}}, {"x": 1}, False),
        ({"properties": {"a": {"properties": {"b": {}}}}}, {"a": {"x": 1}}, False),
        ({}, {"x": 1}, False),
        ({"properties": {}}, {"x": 1}, False),
        ({"properties": {"a": {"type": "object"}}}, {"a": {"x": 1}}, True),
        ({"additionalProperties": True}, {"x": 1}, True),
        ({"properties": {"a": {}}, "additionalProperties": {}}, {"x": 1}, True),
        ({"properties": {"a": {}}, "required": ["x"]}, {"x": 1}, True),
        ({**PARTS, "allOf": [{"$ref": "#/$defs/A"}]}, {"a": 1, "x": 1}, False),
        (
            {**PARTS, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]},
            {"a": 1, "b": 2},
            True,
        ),
        ({**PARTS, "$ref": "#/$defs/A", "properties": {"b": {}}}, {"a": 1, "b": 2}, True),
    ],
)
def test_arguments_have_the_properties_that_are_named(
    schema: Any, value: Any, closed: bool
) -> None:
    assert follows(schema, value, closed=True, root=True) is closed


def test_the_names_of_a_record_are_those_of_its_schema() -> None:
    assert follows(KEYED, {"a": 1}) and not follows(KEYED, {"c": 1})
    named = {"type": "object", "propertyNames": {"pattern": "^x"}}
    assert follows(named, {"xy": 1}) and not follows(named, {"y": 1})


def test_references_keep_their_root() -> None:
    schema = {
        "$id": "http://localhost/tree",
        "properties": {
            "a": {"type": "integer"},
            "b": {"$ref": "#/properties/a"},
            "c": {"$ref": "#"},
            "d": {"$ref": "http://localhost/tree#/properties/a"},
            "e": {"$ref": "#named"},
            "f": {"$anchor": "named", "const": 7},
        },
    }
    options = {"closed": True, "strict": True}
    assert follows(schema, {"b": 1, "c": {"d": 2, "e": 7}}, **options)
    assert not follows(schema, {"b": "x"}, **options)
    assert not follows(schema, {"c": {"d": "x"}}, **options)


def test_blanks_within_json_are_bounded() -> None:
    text = grammar.from_lark(lark({"type": "object"}))
    matcher = grammar.compiled(grammar._bytes(), text)
    assert matcher.try_consume_tokens(list(b"{" + b" " * 1000)) < 50


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "string", "maxLength": 4},
        {"enum": ["a", 1, None]},
        {"type": ["boolean", "null"]},
        {"$ref": "#/$defs/A"},
        {"type": "number", "minimum": 0, "x-unit": "m"},
        *NOT_HELD.values(),
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda each: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, each),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(each, min_size=1, max_size=3)),
        st.builds(
            lambda parts, needed: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts)[:needed],
            },
            st.dictionaries(st.sampled_from(["a", "城市", "$top"]), each, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_texts_validate_against_what_is_held_of_a_schema(schema: Any, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], **PARTS}
    held = held_schema(schema, whose="it", closed=True, root=True)
    text = Walk(f"start: %json {json.dumps(held)}").text(seed)
    if text is not None:
        jsonschema.validate(json.loads(text), held)

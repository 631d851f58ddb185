"""Schemas of growing difficulty, and what is told of answers that do not follow theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from scripted_server import ScriptedServer

from piecework.bench import structured, tool_calls
from piecework.bench.report import Report
from piecework.bench.schemas import LEVELS, Validator, make_schemas
from piecework.bench.structured import StructuredSettings
from piecework.bench.target import Target
from piecework.bench.tool_calls import Call, KindResult, ToolAnswer
from piecework.runtime.sampling.grammar import from_json_schema

QUICK = StructuredSettings(
    concurrencies=(2,), rounds=1, output_len=5, num_schemas=len(LEVELS), max_tokens=50
)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_schema_is_one_that_can_be_followed(seed: int) -> None:
    schemas = make_schemas(2 * len(LEVELS), seed)
    assert [level for level, _ in schemas] == [level for level in range(9) for _ in range(2)]
    for _, schema in schemas:
        Draft202012Validator.check_schema(schema)
        from_json_schema(schema)
    assert schemas == make_schemas(2 * len(LEVELS), seed)


def test_an_answer_that_does_not_follow_its_schema_is_told(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda prompt: '{"other": 1}'
    target, out = Target(base_url=server.url), tmp_path / "out.json"
    assert structured.run(target, QUICK, Report(str(out))) == 1
    written = json.loads(out.read_text())
    assert [row["concurrency"] for row in written["throughput"]] == [2]
    assert len(written["faults"]) == len(LEVELS) and "is a required" in written["faults"][0]
    assert all(each["finished"] == 1 and not each["valid"] for each in written["levels"].values())
    assert "ratio" in capsys.readouterr().out
    schemas = [body["response_format"] for _, body in server.requests if "response_format" in body]
    assert len(schemas) == 16 + len(LEVELS)


TOOL: dict[str, Any] = {
    "name": "tool_0",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
GOOD = Call("tool_0", '{"a": 1}')


@pytest.mark.parametrize(
    ("kind", "calls", "reason", "faults", "valid"),
    [
        ("auto", [], "stop", 0, 0),
        ("required", [GOOD, GOOD], "tool_calls", 0, 2),
        ("required", [GOOD, Call("tool_0", '{"a": ')], "length", 0, 1),
        ("required", [], "length", 0, 0),
        ("required", [], "stop", 1, 0),
        ("required", [Call("tool_0", '{"a": ')], "tool_calls", 1, 0),
        ("auto", [Call("tool_0", '{"a": "x"}')], "tool_calls", 1, 0),
        ("named", [Call("other", '{"a": 1}')], "tool_calls", 1, 0),
        ("single", [GOOD, GOOD], "tool_calls", 1, 2),
    ],
)
def test_what_is_wrong_with_calls(
    kind: str, calls: list[Call], reason: str, faults: int, valid: int
) -> None:
    result = KindResult()
    body = {"tools": [{"function": TOOL}]}
    found = tool_calls._judge(kind, body, ToolAnswer(calls, reason), result, Validator())
    assert (len(found), result.valid) == (faults, valid)


def test_calls_are_read_whole_and_in_pieces(server: ScriptedServer, tmp_path: Path) -> None:
    def call(data: Any) -> Any:
        for choice in data["choices"]:
            part = choice.get("message", choice.get("delta"))
            part.pop("content", None)
            if choice["finish_reason"] is None or "message" in choice:
                is_first = "role" in part or "message" in choice
                text = '{"own": 1}' if "message" in choice else '{"own"' if is_first else ""
                text = ": 1}" if part == {} and choice["finish_reason"] is None else text
                function = {"name": "tool_0", "arguments": text}
                part["tool_calls"] = [{"index": 0, "function": function}]
        return data

    server.bend, server.reply = call, lambda prompt: "one"
    out = tmp_path / "out.json"
    settings = tool_calls.ToolSettings(num_requests=8, max_concurrency=2, max_tokens=9)
    tool_calls.run(Target(base_url=server.url), settings, Report(str(out)))
    kinds = json.loads(out.read_text())["kinds"]
    assert [kinds[f"{kind}, {way}"]["calls"] for kind in tool_calls.KINDS for way in WAYS] == [
        1
    ] * 8
    assert not json.loads(out.read_text())["failures"]


WAYS = ("whole", "streamed")

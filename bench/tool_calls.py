"""Tool calls: whether arguments follow their schemas, and whether answers follow `tool_choice`."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .client import MALFORMED, Client, RequestFailed, resolve
from .load import run_load
from .report import Failures, Report
from .schemas import Schema, Validator, make_schema
from .target import Target

PATH = "/v1/chat/completions"
# `single` is `required` without `parallel_tool_calls`.
KINDS = ("auto", "required", "named", "single")
_HIGHEST = 7  # Highest level of schemas. It has no recursion, so that calls end.


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    num_requests: int = 500
    max_concurrency: int = 16
    max_tokens: int = 400
    temperature: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class KindResult:
    """The counts of one kind of request."""

    requests: int = 0
    called: int = 0  # Answers with a call.
    cut: int = 0  # Answers that ended within a call.
    calls: int = 0  # Whole calls.
    valid: int = 0  # Whole calls whose arguments follow their schema.


class Call(NamedTuple):
    name: str
    arguments: str


class ToolAnswer(NamedTuple):
    calls: list[Call]
    finish_reason: str


def run(target: Target, settings: ToolSettings, report: Report) -> int:
    """Measure and report. Return 1 if a request failed or an answer is wrong, else 0. Raises
    `ValueError` for an error that the user can correct.
    """
    return asyncio.run(_run(target, settings, report))


async def _run(target: Target, settings: ToolSettings, report: Report) -> int:
    validator = Validator()
    target = await resolve(target)
    async with Client(target) as client:
        results, faults, failures = await measure(client, settings, validator)
    report.print([*_lines(results), *faults, *failures.lines()])
    report.write(
        {
            **asdict(settings),
            "kinds": {name: asdict(result) for name, result in results.items()},
            "faults": faults,
            "failures": failures.as_dict(),
        }
    )
    return 1 if failures.total or faults else 0


async def measure(
    client: Client, settings: ToolSettings, validator: Validator
) -> tuple[dict[str, KindResult], list[str], Failures]:
    """Return the counts by kind, whole and streamed apart, the faults, and the failures."""
    rng, failures = random.Random(settings.seed), Failures()
    bodies = [_body(rng, number, settings) for number in range(settings.num_requests)]

    async def send(body: dict[str, Any]) -> ToolAnswer | None:
        asked = {**body, "model": client.target.model}
        try:
            try:
                return await (_streamed(client, asked) if body["stream"] else _whole(client, asked))
            except (KeyError, IndexError, TypeError) as error:
                raise RequestFailed(MALFORMED, f"{type(error).__name__}: {error}") from error
        except RequestFailed as error:
            failures.add(error)
            return None

    answers = await run_load(bodies, send, concurrency=settings.max_concurrency)
    results: defaultdict[str, KindResult] = defaultdict(KindResult)
    faults: list[str] = []
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        kind = _kind(number)
        result = results[f"{kind}, {'streamed' if body['stream'] else 'whole'}"]
        result.requests += 1
        if answer is not None:
            faults += _judge(kind, body, answer, result, validator)
    return dict(results), faults, failures


def _kind(number: int) -> str:
    return KINDS[number // 2 % len(KINDS)]


def _body(rng: random.Random, number: int, settings: ToolSettings) -> dict[str, Any]:
    kind = _kind(number)
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{place}",
                "description": "Takes what you have to say.",
                "parameters": make_schema(rng, rng.randint(0, _HIGHEST)),
            },
        }
        for place in range(rng.randint(1, 3))
    ]
    choice: Any = "auto" if kind == "auto" else "required"
    if kind == "named":
        choice = {"type": "function", "function": {"name": "tool_0"}}
    return {
        "messages": [{"role": "user", "content": f"Call a tool, for the {number}th time."}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": kind != "single",
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": number,
        "stream": number % 2 == 1,
    }


async def _whole(client: Client, body: dict[str, Any]) -> ToolAnswer:
    choice = (await client.post(PATH, body))["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [Call(function["name"], function["arguments"]) for function in functions]
    return ToolAnswer(calls, choice["finish_reason"])


async def _streamed(client: Client, body: dict[str, Any]) -> ToolAnswer:
    names: list[str] = []
    arguments: list[str] = []
    reason = ""
    async with aclosing(client.events(PATH, body)) as events:
        async for event in events:
            for choice in event.data["choices"]:
                for part in choice["delta"].get("tool_calls") or ():
                    if part["index"] == len(names):
                        names.append(part["function"]["name"])
                        arguments.append("")
                    arguments[part["index"]] += part["function"].get("arguments") or ""
                reason = choice["finish_reason"] or reason
    return ToolAnswer([*map(Call, names, arguments)], reason)


def _judge(
    kind: str, body: dict[str, Any], answer: ToolAnswer, result: KindResult, validator: Validator
) -> list[str]:
    """Count an answer, and return its faults."""
    schemas: dict[str, Schema] = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]
    }
    is_cut = answer.finish_reason == "length"
    result.called += bool(answer.calls)
    result.cut += is_cut
    faults = []
    if kind != "auto" and not answer.calls and not is_cut:
        faults.append(f"  {kind}: an answer without a call")
    if kind in ("named", "single") and len(answer.calls) > 1:
        faults.append(f"  {kind}: {len(answer.calls)} calls")
    # The last call of an answer that was cut is incomplete.
    for call in answer.calls[: len(answer.calls) - is_cut]:
        result.calls += 1
        if call.name not in schemas or (kind == "named" and call.name != "tool_0"):
            faults.append(f"  {kind}: a call of {call.name!r:.80}")
            continue
        fault = validator.fault(call.arguments, schemas[call.name])
        result.valid += fault is None
        if fault is not None:
            faults.append(f"  {kind}: {fault}: {call.arguments!r:.200}")
    return faults


def _lines(results: dict[str, KindResult]) -> list[str]:
    columns = ("requests", "called", "cut", "calls", "valid")
    head = f"{'choice':<20}" + "".join(f"{column:>10}" for column in columns)
    return [head] + [
        f"{name:<20}" + "".join(f"{getattr(result, column):>10}" for column in columns)
        for name, result in results.items()
    ]

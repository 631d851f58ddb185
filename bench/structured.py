"""Structured output: its cost, whether every answer follows its schema, and the time of masks."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.files.resolve import resolve_model_path
from ..runtime.sampling import grammar
from ..runtime.sampling.grammar_cache import Grammars
from ..runtime.tokenizer.tokenizer import load_tokenizer
from .client import Client, RequestFailed, resolve
from .load import run_load
from .report import Failures, Report, distribution
from .schemas import LEVELS, Schema, Validator, make_schemas
from .target import Target

PATH = "/v1/completions"
PROMPT = "A JSON document with random content:\n"
# Longer than any answer, so that answers end by their number of tokens.
LIST: Schema = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSettings:
    """The loads."""

    concurrencies: tuple[int, ...] = (1, 8, 32)  # Concurrency of the throughput.
    rounds: int = 3  # Rounds of both loads per concurrency.
    output_len: int = 64  # Tokens of an answer, plus or minus a quarter.
    num_schemas: int = 200  # Requests with a schema each.
    max_concurrency: int = 16  # Concurrent requests with schemas.
    max_tokens: int = 400
    temperature: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class LevelResult:
    """The results of the schemas of one level."""

    asked: int = 0
    finished: int = 0
    valid: int = 0
    mask_us: list[float] = field(default_factory=list)  # Microseconds of each token.


def run(target: Target, settings: StructuredSettings, report: Report) -> int:
    """Measure and report. Return 1 if a request failed or a finished answer is invalid, else 0.
    Raises `ValueError` for an error that the user can correct.
    """
    return asyncio.run(_run(target, settings, report))


async def _run(target: Target, settings: StructuredSettings, report: Report) -> int:
    validator, failures = Validator(), Failures()
    target = await resolve(target)
    async with Client(target) as client:
        rates = await measure_rates(client, settings, failures)
        report.print(_rate_lines(rates))
        levels, faults = await check_schemas(client, settings, validator, failures)
        report.print([*_level_lines(levels), *faults, *failures.lines()])
    report.write(
        {
            **asdict(settings),
            "throughput": rates,
            "levels": {
                LEVELS[level]: {**asdict(result), "mask_us": distribution(result.mask_us)}
                for level, result in levels.items()
            },
            "faults": faults,
            "failures": failures.as_dict(),
        }
    )
    return 1 if failures.total or faults else 0


# Throughput


async def measure_rates(
    client: Client, settings: StructuredSettings, failures: Failures
) -> list[dict[str, float]]:
    """Return a row per concurrency: tokens per second without and with a schema, measured in
    turn.
    """
    rows = []
    for concurrency in settings.concurrencies:
        tokens, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
        # The first round is a warm-up.
        for number in range(settings.rounds + 1):
            for load in ("free", "schema"):
                began = time.perf_counter()
                made = await _tokens(client, settings, failures, concurrency, load == "schema")
                if number:
                    tokens[load] += made
                    seconds[load] += time.perf_counter() - began
        free, schema = (tokens[load] / seconds[load] for load in ("free", "schema"))
        ratio = schema / free if free else 0.0
        rows.append({"concurrency": concurrency, "free": free, "schema": schema, "ratio": ratio})
    return rows


async def _tokens(
    client: Client,
    settings: StructuredSettings,
    failures: Failures,
    concurrency: int,
    schema: bool,
) -> int:
    """Return the number of output tokens of one round.

    Each client sends four requests on average, so that a late end leaves few clients idle.
    """
    spread = settings.output_len // 4

    async def send(number: int) -> int:
        # With a schema, forced tokens make requests end one by one, and prompts come between
        # decodes. Varied lengths do the same without a schema.
        body: dict[str, Any] = {
            "model": client.target.model,
            "prompt": f"{number} {PROMPT}",
            "max_tokens": settings.output_len - spread + number * 7 % (2 * spread + 1),
            "temperature": settings.temperature,
            "seed": number,
            "ignore_eos": True,
        }
        if schema:
            body["response_format"] = _format(LIST)
        try:
            return int((await client.post(PATH, body))["usage"]["completion_tokens"])
        except RequestFailed as error:
            failures.add(error)
            return 0

    return sum(await run_load(range(4 * concurrency), send, concurrency=concurrency))


def _rate_lines(rows: list[dict[str, float]]) -> list[str]:
    lines = [f"{'concurrency':>12}{'free tok/s':>14}{'schema tok/s':>14}{'ratio':>8}"]
    return lines + [
        f"{row['concurrency']:>12}{row['free']:>14.1f}{row['schema']:>14.1f}{row['ratio']:>8.3f}"
        for row in rows
    ]


# Answers


async def check_schemas(
    client: Client, settings: StructuredSettings, validator: Validator, failures: Failures
) -> tuple[dict[int, LevelResult], list[str]]:
    """Ask for answers to many schemas. Return the counts by level, and the faults."""
    schemas = make_schemas(settings.num_schemas, settings.seed)

    async def send(number: int) -> dict[str, Any] | None:
        body = {
            "model": client.target.model,
            "prompt": PROMPT,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": number,
            "response_format": _format(schemas[number][1]),
        }
        try:
            choice: dict[str, Any] = (await client.post(PATH, body))["choices"][0]
            return choice
        except RequestFailed as error:
            failures.add(error)
            return None

    choices = await run_load(range(len(schemas)), send, concurrency=settings.max_concurrency)
    masks = await _masks_of(client)
    levels: defaultdict[int, LevelResult] = defaultdict(LevelResult)
    faults = []
    for (level, schema), choice in zip(schemas, choices, strict=True):
        result = levels[level]
        result.asked += 1
        if choice is None:
            continue
        if masks is not None:
            result.mask_us += masks.times(schema, choice["text"])
        if choice["finish_reason"] == "stop":
            result.finished += 1
            fault = validator.fault(choice["text"], schema)
            result.valid += fault is None
            if fault is not None:
                faults.append(f"  {fault}: {choice['text']!r:.200}")
    return dict(levels), faults


def _level_lines(levels: dict[int, LevelResult]) -> list[str]:
    each = levels.values()
    every = LevelResult(
        sum(result.asked for result in each),
        sum(result.finished for result in each),
        sum(result.valid for result in each),
        [value for result in each for value in result.mask_us],
    )
    head = f"{'level':<12}{'schemas':>9}{'finished':>10}{'valid':>7}{'mask p50 us':>13}{'p99':>9}"
    rows = [(LEVELS[level], result) for level, result in sorted(levels.items())]
    return ["", head, *(_level_line(*row) for row in [*rows, ("all", every)])]


def _level_line(name: str, result: LevelResult) -> str:
    found = distribution(result.mask_us)
    masks = f"{'-':>13}{'-':>9}"
    if found is not None:
        masks = f"{found['median']:>13.1f}{found['p99']:>9.1f}"
    return f"{name:<12}{result.asked:>9}{result.finished:>10}{result.valid:>7}{masks}"


def _format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Masks


class Masks:
    """Measures masks in this process with the server's tokenizer."""

    def __init__(self, model_path: str, vocab_size: int) -> None:
        path = resolve_model_path(model_path)
        self._tokenizer = load_tokenizer(path)
        self._vocab_size = vocab_size
        self._grammars = Grammars(lambda: self._tokenizer, vocab_size, frozenset())

    def times(self, schema: Schema, text: str) -> list[float]:
        """Return the microseconds of the mask before each token of an answer."""
        matcher = self._grammars.matcher(grammar.from_json_schema(schema))
        bits = np.empty(-(-self._vocab_size // 32), np.int32)
        times = []
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            began = time.perf_counter()
            matcher.fill(bits)
            times.append((time.perf_counter() - began) * 1e6)
            matcher.accept([token])
            if matcher.fault is not None:
                break
        return times


async def _masks_of(client: Client) -> Masks | None:
    """Return the masks, or None if the server's model is not on this machine."""
    try:
        info = await client.get_json("/get_model_info")
        path = str(info["model_path"])
        known = Path(path).exists() or "/" not in path
        return Masks(path, int(info["vocab_size"])) if known else None
    except (RequestFailed, KeyError, TypeError, ValueError):
        return None

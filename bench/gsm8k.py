"""GSM8K with few-shot prompts, as in SGLang's `few_shot_gsm8k`, on one server or several."""

from __future__ import annotations

import ast
import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..runtime.process.progress import progress_bar
from .apis import Answer, GenerationCall, ask
from .client import Client, RequestFailed, resolve
from .datasets import GSM8K_STOPS, Question, few_shot_prompts, load_gsm8k
from .load import run_load
from .report import Failures, Report
from .server_process import first_token, running_server
from .target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kSettings:
    """The settings of one evaluation."""

    num_shots: int = 5
    num_questions: int = 200
    max_new_tokens: int = 512
    parallel: int = 128
    data_path: str | None = None  # None: GSM8K's test set, downloaded once.


@dataclass(slots=True, kw_only=True)
class Gsm8kResult:
    """The answers of one server. A question without an answer counts as wrong."""

    labels: list[int]
    predictions: list[int | None]  # The number in each answer, or None.
    answered: list[bool]  # Whether each question has an answer.
    failures: Failures
    latency: float  # Seconds of the whole evaluation.
    output_tokens: int
    without_usage: int = 0

    @property
    def right(self) -> list[bool]:
        return [
            prediction == label
            for prediction, label in zip(self.predictions, self.labels, strict=True)
        ]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.labels)

    @property
    def invalid(self) -> float:
        """The share of the questions whose answer holds no number."""
        return sum(
            done and found is None
            for done, found in zip(self.answered, self.predictions, strict=True)
        ) / len(self.labels)

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.latency

    def lines(self) -> list[str]:
        """Return the four lines of SGLang's harness, and a line of failures."""
        lines = [
            f"Accuracy: {self.accuracy:.3f}",
            f"Invalid: {self.invalid:.3f}",
            f"Latency: {self.latency:.3f} s",
            f"Output throughput: {self.output_throughput:.3f} token/s",
        ]
        if self.failures.total:
            lines += [
                f"Failed: {self.failures.total} of {len(self.labels)} requests, counted as wrong",
                *self.failures.lines(),
            ]
        if self.without_usage:
            lines.append(
                f"{self.without_usage} answers came without usage; their tokens are missing in the "
                "throughput"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "invalid": self.invalid,
            "latency": self.latency,
            "output_throughput": self.output_throughput,
            "output_tokens": self.output_tokens,
            "failed": self.failures.total,
            "failures": self.failures.as_dict(),
            "predictions": self.predictions,
        }


class Difference(NamedTuple):
    """The accuracy of A minus that of B, on the questions that both answered."""

    value: float
    standard_error: float | None
    pairs: int  # Questions that both answered.
    only_a: int  # Right only in A.
    only_b: int

    def line(self) -> str:
        error = "unknown" if self.standard_error is None else f"{self.standard_error:.4f}"
        return (
            f"Accuracy difference: {self.value:+.4f}, standard error {error} "
            f"(paired, {self.pairs} questions; right in the first alone {self.only_a}, in the "
            f"second alone {self.only_b})"
        )


def answer_value(text: str) -> int | None:
    """Return the last run of digits once commas are removed, or None.

    This is SGLang's `get_answer_value`: 18.50 gives 50, and 007 gives None.
    """
    numbers = re.findall(r"\d+", text.replace(",", ""))
    try:
        return int(ast.literal_eval(numbers[-1])) if numbers else None
    except SyntaxError:
        return None


def paired_difference(a: Gsm8kResult, b: Gsm8kResult) -> Difference:
    """Return the mean of the differences per question, and its standard error s / sqrt(n).

    s divides by n - 1.
    """
    both = [x and y for x, y in zip(a.answered, b.answered, strict=True)]
    pairs = [(int(x), int(y)) for x, y, used in zip(a.right, b.right, both, strict=True) if used]
    differences = [x - y for x, y in pairs]
    error = (
        float(np.std(differences, ddof=1) / np.sqrt(len(differences)))
        if len(differences) > 1
        else None
    )
    value = float(np.mean(differences)) if differences else 0.0
    return Difference(value, error, len(pairs), pairs.count((1, 0)), pairs.count((0, 1)))


def _label(number: int, question: Question) -> int:
    label = answer_value(question.answer)
    if label is None:
        raise ValueError(
            f"question {number} has no number in its answer, so nothing can be compared with it"
        )
    return label


@dataclass(slots=True)
class _Evaluation:
    """A running evaluation of one server."""

    client: Client
    bar: Any
    failures: Failures = field(default_factory=Failures)

    async def ask(self, call: GenerationCall) -> Answer | None:
        try:
            return await ask(self.client, call)
        except RequestFailed as error:
            self.failures.add(error)
            return None
        finally:
            self.bar.update()


async def evaluate(
    target: Target, settings: Gsm8kSettings, prompts: Sequence[str], labels: list[int]
) -> Gsm8kResult:
    """Ask one server every question. The target must name a model."""
    calls = [
        GenerationCall(prompt=prompt, max_tokens=settings.max_new_tokens, stop=GSM8K_STOPS)
        for prompt in prompts
    ]
    async with Client(target) as client:
        with progress_bar(total=len(calls), unit="question") as bar:
            evaluation = _Evaluation(client, bar)
            begin = time.perf_counter()
            answers = await run_load(calls, evaluation.ask, concurrency=settings.parallel)
            latency = time.perf_counter() - begin
    given = [answer for answer in answers if answer is not None]
    return Gsm8kResult(
        labels=labels,
        predictions=[
            None if answer is None else answer_value(answer.texts[0]) for answer in answers
        ],
        answered=[answer is not None for answer in answers],
        failures=evaluation.failures,
        latency=latency,
        output_tokens=sum(answer.completion_tokens or 0 for answer in given),
        without_usage=sum(answer.completion_tokens is None for answer in given),
    )


class Evaluated(NamedTuple):
    """A server and what its answers were. `name` is its URL, or the label of its command."""

    name: str
    target: Target
    result: Gsm8kResult

    def as_dict(self) -> dict[str, Any]:
        server = {
            "base_url": self.target.base_url,
            "api": self.target.api,
            "model": self.target.model,
        }
        return {**server, **self.result.as_dict()}


def run(
    target: Target,
    settings: Gsm8kSettings,
    compare: str | None,
    report: Report,
    servers: Sequence[tuple[str, str]] = (),
) -> int:
    """Evaluate and report. Return 1 if a request failed, else 0.

    If there are `servers` (labels and commands), start each in turn and evaluate it. Otherwise,
    evaluate `target`, and the server at the URL `compare`. Raises `ValueError` for an error that
    the user can correct.
    """
    questions = load_gsm8k(settings.data_path)
    prompts = few_shot_prompts(questions, settings.num_shots, settings.num_questions)
    labels = [
        _label(number, question) for number, question in enumerate(questions[: len(prompts)], 1)
    ]

    async def evaluate_one(name: str, target: Target, *, alone: bool) -> Evaluated:
        result = await evaluate(target, settings, prompts, labels)
        report.print(result.lines() if alone else [name, *result.lines(), ""])
        return Evaluated(name, target, result)

    async def evaluate_running() -> list[Evaluated]:
        # Resolve all targets before the first question, so that an error ends the run early.
        asked = [target] if compare is None else [target, replace(target, base_url=compare)]
        named = [await resolve(each) for each in asked]
        return [await evaluate_one(each.base_url, each, alone=compare is None) for each in named]

    def evaluate_command(label: str, command: str) -> Evaluated:
        with running_server(label, command) as (process, port):
            own = replace(target, base_url=f"http://127.0.0.1:{port}")
            named = asyncio.run(first_token(label, own, process))
            return asyncio.run(evaluate_one(label, named, alone=len(servers) == 1))

    found = [evaluate_command(*server) for server in servers] or asyncio.run(evaluate_running())
    asked = {**asdict(settings), "num_questions": len(labels)}
    if len(found) == 1:
        report.write({**asked, **found[0].as_dict()})
    else:
        report.write({**asked, **_compared(found, report)})
    return 1 if any(each.result.failures.total for each in found) else 0


def _compared(found: Sequence[Evaluated], report: Report) -> dict[str, Any]:
    """Print the difference of the first server to each other one. Return the JSON."""
    differences = [paired_difference(found[0].result, each.result) for each in found[1:]]
    for each, difference in zip(found[1:], differences, strict=True):
        between = f"{found[0].name} - {each.name}: " if len(found) > 2 else ""
        report.print([between + difference.line()])
    return {
        "servers": [{"name": each.name, **each.as_dict()} for each in found],
        "difference": differences[0]._asdict(),
        "differences": [difference._asdict() for difference in differences],
    }

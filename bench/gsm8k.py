"""GSM8K with few-shot prompts, as in SGLang's `few_shot_gsm8k`, on one server or two."""

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


def run(target: Target, settings: Gsm8kSettings, compare: str | None, report: Report) -> int:
    """Evaluate and report. Return 1 if a request failed, else 0. Raises `ValueError` for an error
    that the user can correct.
    """
    questions = load_gsm8k(settings.data_path)
    prompts = few_shot_prompts(questions, settings.num_shots, settings.num_questions)
    labels = [
        _label(number, question) for number, question in enumerate(questions[: len(prompts)], 1)
    ]
    targets = [target] if compare is None else [target, replace(target, base_url=compare)]
    return asyncio.run(_run(targets, settings, prompts, labels, report))


async def _run(
    targets: list[Target],
    settings: Gsm8kSettings,
    prompts: list[str],
    labels: list[int],
    report: Report,
) -> int:
    # Resolve all targets before the first question, so that an error ends the run early.
    targets = [await resolve(target) for target in targets]
    results = []
    for target in targets:
        result = await evaluate(target, settings, prompts, labels)
        report.print([target.base_url, *result.lines(), ""] if len(targets) > 1 else result.lines())
        results.append(result)
    asked = {**asdict(settings), "num_questions": len(labels)}
    whole: dict[str, Any] = {**asked, **_server(targets[0]), **results[0].as_dict()}
    if len(targets) > 1:
        difference = paired_difference(*results)
        report.print([difference.line()])
        servers = [
            {**_server(target), **result.as_dict()}
            for target, result in zip(targets, results, strict=True)
        ]
        whole = {**asked, "servers": servers, "difference": difference._asdict()}
    report.write(whole)
    return 1 if any(result.failures.total for result in results) else 0


def _server(target: Target) -> dict[str, Any]:
    return {"base_url": target.base_url, "api": target.api, "model": target.model}

"""Tokens per second with speculation and without it, in turn.

    python -m piecework.lab.speculation

Both engines run in this process. The workloads `edit` and `lookup` need an answer that a small
model does not write by itself, so their tokens are forced: each step computes what it always does,
and then every position gets the token of the wanted answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.core.ahead import Ahead, Sampler
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.executor.step import PendingStep, StepTokens
from ..runtime.llm import LLM
from ..runtime.sampling.grammar import from_json_schema
from ..runtime.sampling.sampler import KnownSamples

_MOST_TOKENS = 700
# Seconds that one engine runs before the other one continues: more than the pause after which an
# engine takes no step's time (`step_costs`).
_SLICE = 0.4
_numbers = count()
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "city": {"enum": ["Paris", "Berlin", "Madrid", "Rome", "Vienna"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 30},
        "is_customer": {"type": "boolean"},
        "orders": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "product": {"type": "string", "maxLength": 15},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["product", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "city", "age", "email", "is_customer", "orders"],
    "additionalProperties": False,
}
_QUESTIONS = (
    "Tell me a story about a dragon named {}.", "Explain to a child how a {} works.",
    "Write a letter to a friend who lives in {}.", "What is the history of {}?",
)  # fmt: skip
_THINGS = ("Ben", "a clock", "Lisbon", "paper", "a bridge", "a whale", "Oslo", "tea")


class Job(NamedTuple):
    """One request. If `answer` is set, its tokens are forced."""

    prompt: list[int]
    params: SamplingParams
    prediction: Sequence[int] = ()
    answer: list[int] | None = None


class Result(NamedTuple):
    """Tokens per second while all requests decode, and the texts."""

    rate: float
    tokens: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.speculation", description=__doc__
    )
    parser.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    parser.add_argument("--draft", help="a draft model for the engine with speculation")
    parser.add_argument("--gsm8k", type=Path, help="test.jsonl of GSM8K, for the workload gsm8k")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each engine, in turn")
    parser.add_argument("--only", default="", help="workloads to run, with commas; default: all")
    parser.add_argument("--num-threads", type=int, help="threads of each engine; default: all")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="tokens per second of processor time, on a machine that others use too; needs "
        "--num-threads 1",
    )
    options = parser.parse_args()
    if options.processor_time and options.num_threads != 1:
        # Threads that wait for others take processor time too.
        parser.error("--processor-time needs --num-threads 1")
    if options.processor_time:
        # The engines measure their steps by it too.
        time.perf_counter = time.process_time
    drafts = {"speculative_draft_model_path": options.draft} if options.draft else {}
    fixed: dict[str, Any] = {"random_seed": 1, "num_threads": options.num_threads}
    engines = [
        LLM(options.model, speculative_algorithm=algorithm, **fixed, **settings)
        for algorithm, settings in (("none", {}), ("auto", drafts))
    ]
    loads = _workloads(engines[0], options.gsm8k)
    chosen = options.only.split(",") if options.only else list(loads)
    print(f"{'workload':<22}{'off, tokens/s':>15}{'on':>10}{'ratio':>8}{'least':>8}{'most':>8}")
    for name in chosen:
        ratios, rates = [], []
        for _ in range(options.rounds):
            # Each round has other requests, so that no answer is known from an earlier one.
            jobs = loads[name]()
            off, on = _run(engines, jobs)
            ratios.append(on.rate / off.rate)
            rates.append((off.rate, on.rate))
        off_rate, on_rate = (statistics.median(each) for each in zip(*rates, strict=True))
        print(
            f"{name:<22}{off_rate:>15.1f}{on_rate:>10.1f}{statistics.median(ratios):>8.2f}"
            f"{min(ratios):>8.2f}{max(ratios):>8.2f}",
            flush=True,
        )


def _workloads(llm: LLM, gsm8k: Path | None) -> dict[str, Callable[[], list[Job]]]:
    loads: dict[str, Callable[[], list[Job]]] = {
        f"{name} {size}": partial(_several, size, make)
        for name, make, sizes in (
            ("edit", partial(_edit, llm, predicted=True), (1, 8)),
            ("lookup", partial(_edit, llm, predicted=False), (1, 8)),
            ("json", partial(_json, llm), (1, 8)),
            ("chat", partial(_chat, llm), (1, 8, 32)),
        )
        for size in sizes
    }
    if gsm8k is not None:
        lines = gsm8k.read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line)["question"] for line in lines]

        def ask() -> Job:
            question = questions[next(_numbers) % len(questions)]
            params = SamplingParams(temperature=0.0, max_new_tokens=128, ignore_eos=True)
            return Job(llm.tokenizer.encode(f"Question: {question}\nAnswer:"), params)

        loads |= {f"gsm8k {size}": partial(_several, size, ask) for size in (1, 8, 32)}
    return loads


def _several(size: int, make: Callable[[], Job]) -> list[Job]:
    return [make() for _ in range(size)]


def _edit(llm: LLM, *, predicted: bool) -> Job:
    """Return a request for a file of 150 lines with one change in it."""
    number = next(_numbers)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()[:150]
    lines[3] = f"# Version {number}."
    old = "\n".join(lines)
    new = old.replace("class Result(NamedTuple):", "class Measured(NamedTuple):\n    # Renamed.")
    encode = llm.tokenizer.encode
    prompt = encode(
        f"Rename the class Result to Measured in this file.\n\n{old}\n\nThe new file:\n"
    )
    answer = encode(new, add_special_tokens=False)
    # The change is in the first part of the file.
    length = min(len(answer), _MOST_TOKENS)
    params = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
    prediction = encode(old, add_special_tokens=False) if predicted else []
    return Job(prompt, params, prediction, answer)


def _json(llm: LLM) -> Job:
    number = next(_numbers)
    prompt = llm.tokenizer.encode(f"Customer {number} as JSON:\n")
    params = SamplingParams(
        temperature=0.7, seed=number, max_new_tokens=160, grammar=from_json_schema(_SCHEMA)
    )
    return Job(prompt, params)


def _chat(llm: LLM) -> Job:
    number = next(_numbers)
    question = _QUESTIONS[number % 4].format(_THINGS[number // 4 % 8])
    prompt = llm.tokenizer.encode(f"{number}. {question}\n")
    params = SamplingParams(temperature=1.0, seed=number, max_new_tokens=128, ignore_eos=True)
    return Job(prompt, params)


class _Run:
    """Requests that an engine computes together, in slices of time.

    Tokens and time count while all requests decode. The last ones of a batch, which take longer for
    a token, do not count: a server starts others in the place of those that end.
    """

    def __init__(self, llm: LLM, jobs: list[Job]) -> None:
        self._core = llm.core
        self.answers: dict[str, list[int]] = {}
        self._found: dict[str, list[int]] = {}
        self._before, self._counted, self._seconds = 0, 0, 0.0
        for job in jobs:
            rid = str(next(_numbers))
            self._found[rid] = []
            if job.answer is not None:
                self.answers[rid] = job.answer
            self._core.add(
                GenerateRequest(
                    rid=rid,
                    input_ids=job.prompt,
                    params=job.params,
                    prediction_ids=list(job.prediction),
                )
            )

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def advance(self, seconds: float) -> None:
        """Run steps for so many seconds."""
        began = now = time.perf_counter()
        while self.has_work and now - began < seconds:
            has_ended = False
            for output in self._core.step().outputs:
                assert output.error is None, output.error
                self._found[output.rid] += output.token_ids
                has_ended |= output.finish_reason is not None
            before, now = now, time.perf_counter()
            if self._before and not self._counted:
                self._seconds += now - before
                if has_ended:
                    self._counted = self._length - self._before
            elif not self._before and all(self._found.values()):
                self._before = self._length

    @property
    def _length(self) -> int:
        return sum(map(len, self._found.values()))

    def result(self) -> Result:
        self._core.flush_cache()
        return Result(self._counted / self._seconds, list(self._found.values()))


def _run(engines: Sequence[LLM], jobs: list[Job]) -> list[Result]:
    """Return the results of engines that compute the same requests, in turn.

    What slows the machine down for some seconds slows all of them down.
    """
    runs = [_Run(engine, jobs) for engine in engines]
    answers = {rid: answer for run in runs for rid, answer in run.answers.items()}
    read = PendingStep.read
    if answers:
        PendingStep.read = _forced(read, answers)  # type: ignore
    try:
        while any(run.has_work for run in runs):
            for run in runs:
                run.advance(_SLICE)
    finally:
        PendingStep.read = read  # type: ignore[method-assign]
    return [run.result() for run in runs]


def _forced(
    read: Callable[[PendingStep], list[StepTokens]], answers: dict[str, list[int]]
) -> Callable[[PendingStep], list[StepTokens]]:
    """Return a `PendingStep.read` that gives each position the token of its answer."""

    def token(sampler: Sampler) -> int:
        answer = answers[(sampler.request if isinstance(sampler, Ahead) else sampler).rid]
        # The placeholder of this step is counted already.
        place = sampler.num_output - sampler.num_placeholders
        return answer[min(place, len(answer) - 1)]

    def forced(step: PendingStep) -> list[StepTokens]:
        if step.samples is not None:
            step.samples.read()
            step.samples = KnownSamples([token(sampler) for sampler in step.samplers])
        return read(step)

    return forced


if __name__ == "__main__":
    main()

"""A fixed load on a server, and the times of its answers."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import uvloop

from ..runtime.process.progress import progress_bar
from .adapters import choose_adapters
from .apis import Answer, GenerationCall, ask
from .client import Client, RequestFailed, ServerUnusable, resolve
from .load import poisson_arrivals, run_load
from .proposals import Proposals, read_proposals
from .report import Failures, Report, distribution
from .target import Target
from .workloads import Prompt, Workload, make_prompts

MILLISECONDS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The load."""

    num_prompts: int = 200
    request_rate: float = float("inf")  # Arrivals per second. Infinite: all at once.
    max_concurrency: int | None = None  # None: no limit.
    num_warmups: int = 1  # Requests sent one by one before measuring.
    temperature: float = 0.0
    ignore_eos: bool = False
    stream: bool = True
    seed: int = 0
    lora: tuple[
        str, ...
    ] = ()  # Names of adapters (LoRA). Empty: requests go to the target's model.
    lora_zipf: float | None = None  # Exponent of the adapters' shares. None: in turn.
    images_alone: int = 5  # Requests with a new image that are measured alone, each of them twice.


@dataclass(slots=True)
class ServingResult:
    """What a load measured, in seconds.

    Attributes:
        ttft: From sending a request to its first token.
        tpot: Mean time of each further token of a request.
        itl: Gaps between events with tokens, of all requests.
        e2e: From sending a request to its end.
        duration: From the first request to the last answer.
        proposals: What speculation proposed meanwhile. None: the server has no such metrics.
        first_image, same_image: From sending a request with a new image to its first token, and
            from sending the same request again.
    """

    duration: float
    failures: Failures
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    without_usage: int = 0
    proposals: Proposals | None = None
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    first_image: list[float] = field(default_factory=list)
    same_image: list[float] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        """Add one answer. If the server sends no usage, each event counts as a token."""
        times = answer.token_times
        tokens = answer.completion_tokens
        if tokens is None:
            self.without_usage += 1
            tokens = len(times)
        self.completed += 1
        self.prompt_tokens += answer.prompt_tokens or 0
        self.output_tokens += tokens
        self.e2e.append(answer.ended - answer.sent)
        if times:
            self.ttft.append(times[0] - answer.sent)
            self.itl += [later - earlier for earlier, later in pairwise(times)]
            if tokens > 1:
                self.tpot.append((times[-1] - times[0]) / (tokens - 1))

    def as_dict(self) -> dict[str, Any]:
        """Return counts, rates per second, and distributions in milliseconds."""
        latencies = {
            "ttft_ms": self.ttft,
            "tpot_ms": self.tpot,
            "itl_ms": self.itl,
            "e2e_ms": self.e2e,
            "first_image_ms": self.first_image,
            "same_image_ms": self.same_image,
        }
        return {
            "completed": self.completed,
            "failed": self.failures.total,
            "failures": self.failures.as_dict(),
            "duration": self.duration,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "answers_without_usage": self.without_usage,
            "request_throughput": self.completed / self.duration,
            "prompt_throughput": self.prompt_tokens / self.duration,
            "output_throughput": self.output_tokens / self.duration,
            "total_throughput": (self.prompt_tokens + self.output_tokens) / self.duration,
            "mean_concurrency": sum(self.e2e) / self.duration,
            "proposals": None if self.proposals is None else asdict(self.proposals),
            **{
                name: distribution([value * MILLISECONDS for value in values])
                for name, values in latencies.items()
            },
        }

    def lines(self) -> list[str]:
        """Return the table."""
        figures = self.as_dict()
        lines = [
            f"Requests:             {self.completed} answered, {self.failures.total} failed",
            *self.failures.lines(),
            f"Duration:             {self.duration:.2f} s",
            f"Tokens:               {self.prompt_tokens} in, {self.output_tokens} out",
            f"Request throughput:   {figures['request_throughput']:.2f} requests/s",
            f"Input throughput:     {figures['prompt_throughput']:.1f} token/s",
            f"Output throughput:    {figures['output_throughput']:.1f} token/s",
            f"Total throughput:     {figures['total_throughput']:.1f} token/s",
            f"Mean concurrency:     {figures['mean_concurrency']:.1f}",
        ]
        if self.proposals is not None and self.proposals.proposed:
            lines.append(self.proposals.line())
        if self.without_usage:
            lines.append(
                f"{self.without_usage} answers came without usage; their output tokens were "
                "counted by events, their input is missing"
            )
        if self.first_image:
            new, same = (figures[f"{name}_image_ms"]["median"] for name in ("first", "same"))
            lines.append(
                f"One request alone:    first token after {new:.1f} ms for a new image, {same:.1f} "
                f"ms for the same image again ({new / same:.1f}x; medians of "
                f"{len(self.first_image)})"
            )
        return [*lines, "", *_latency_table(figures)]


def _latency_table(figures: dict[str, Any]) -> list[str]:
    columns = ("mean", "median", "p90", "p99")
    lines = [f"{'ms':<8}" + "".join(f"{column:>12}" for column in columns)]
    for name in ("ttft", "tpot", "itl", "e2e"):
        row = figures[f"{name}_ms"]
        values = (
            ["-"] * len(columns) if row is None else [f"{row[column]:.2f}" for column in columns]
        )
        lines.append(f"{name.upper():<8}" + "".join(f"{value:>12}" for value in values))
    return lines


def run(target: Target, settings: ServingSettings, workload: Workload, report: Report) -> int:
    """Measure and report. Return 1 if a request failed, else 0. Raises `ValueError` for an error
    that the user can correct.
    """
    if settings.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {settings.num_prompts}")
    if settings.lora_zipf is not None and not settings.lora:
        raise ValueError("--lora-zipf needs --lora: name the adapters that requests choose from")
    code: int = uvloop.run(_run(target, settings, workload, report))
    return code


async def _run(
    target: Target, settings: ServingSettings, workload: Workload, report: Report
) -> int:
    target = await resolve(target)
    result = await measure(target, settings, workload)
    report.print(result.lines())
    server = {"base_url": target.base_url, "api": target.api, "model": target.model}
    asked = {**asdict(settings), "request_rate": str(settings.request_rate), **asdict(workload)}
    report.write({**server, **asked, **result.as_dict()})
    return 1 if result.failures.total else 0


async def measure(target: Target, settings: ServingSettings, workload: Workload) -> ServingResult:
    """Put the load on the server. The target must name a model.

    Raises `ServerUnusable`, or `ValueError` if a data set is missing.
    """
    rng = random.Random(settings.seed)
    async with Client(target) as client:
        if workload.needs_vocab_size and workload.vocab_size is None:
            workload = replace(workload, vocab_size=await _vocab_size(client))
        prompts = make_prompts(workload, settings.num_warmups + settings.num_prompts, rng)
        adapters = choose_adapters(settings.lora, len(prompts), settings.lora_zipf, settings.seed)
        calls = [
            replace(_call(prompt, settings), adapter=adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        for call in calls[: settings.num_warmups]:
            await _warm_up(client, call)
        alone = await _images_alone(client, workload, settings, rng) if workload.images else []
        before = await read_proposals(client)
        result = await _measure(client, calls[settings.num_warmups :], settings, rng)
        for new, same in alone:
            result.first_image.append(new)
            result.same_image.append(same)
        if before is not None:
            after = await read_proposals(client)
            result.proposals = None if after is None else after - before
        return result


async def _measure(
    client: Client, calls: list[GenerationCall], settings: ServingSettings, rng: random.Random
) -> ServingResult:
    failures = Failures()

    async def send(call: GenerationCall) -> Answer | None:
        try:
            return await ask(client, call)
        except RequestFailed as error:
            failures.add(error)
            return None
        finally:
            bar.update()

    arrivals = poisson_arrivals(len(calls), settings.request_rate, rng)
    with progress_bar(total=len(calls), unit="request") as bar:
        begin = time.perf_counter()
        answers = await run_load(
            calls, send, concurrency=settings.max_concurrency, arrivals=arrivals
        )
        result = ServingResult(time.perf_counter() - begin, failures)
    for answer in answers:
        if answer is not None:
            result.add(answer)
    return result


async def _images_alone(
    client: Client, workload: Workload, settings: ServingSettings, rng: random.Random
) -> list[tuple[float, float]]:
    """Return the seconds to the first token of requests with new images, and of the same again."""
    prompts = make_prompts(replace(workload, image_share=1.0), settings.images_alone, rng)
    times = []
    for prompt in prompts:
        call = replace(_call(prompt, settings), max_tokens=1)
        taken = []
        for _ in range(2):
            answer = await ask(client, call)
            first = answer.token_times[0] if answer.token_times else answer.ended
            taken.append(first - answer.sent)
        times.append((taken[0], taken[1]))
    return times


def _call(prompt: Prompt, settings: ServingSettings) -> GenerationCall:
    return GenerationCall(
        prompt=prompt.content,
        max_tokens=prompt.max_tokens,
        stop=prompt.stop,
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        stream=settings.stream,
        images=prompt.images,
    )


async def _warm_up(client: Client, call: GenerationCall) -> None:
    """Send the first requests. Raises `ServerUnusable` if the server refuses one, because it would
    refuse all.
    """
    try:
        await ask(client, call)
    except RequestFailed as error:
        raise ServerUnusable(
            f"the first request to {client.target.base_url} failed: {error}"
        ) from None


async def _vocab_size(client: Client) -> int:
    """Return the vocabulary's size from `/get_model_info`. Raises `ServerUnusable` if it is
    missing.
    """
    try:
        return int((await client.get_json("/get_model_info"))["vocab_size"])
    except (RequestFailed, KeyError, TypeError, ValueError):
        message = (
            "does not tell its vocabulary's size: give it with --vocab-size, or send text "
            "with --prompt-kind words"
        )
        raise ServerUnusable(f"{client.target.base_url} {message}") from None

"""Random requests to an engine process with speculation that is killed, and to an engine without.

    python -m piecework.lab.speculation_engines MODEL --draft DRAFT --requests 5000 --kills 20

The engine without speculation runs in this process. The other one is supervised as in a server,
which resumes its requests in a new process after each kill. There is no HTTP between them, so
thousands of requests take minutes. The answers must be equal, log-probabilities within 0.001. The
exit code is 1 if one differs. `speculation_faults` does the same to whole servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..runtime.config.engine import EngineConfig
from ..runtime.core.generation import GenerateRequest, TokenOutput
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.llm import LLM
from ..runtime.sampling import grammar
from ..runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from ..server.engine.client import EngineClient

_GRAMMARS = tuple(
    map(grammar.from_regex, ("(yes|no|maybe)( and (yes|no))*", "[a-f]{4,30}", r"\d+(, \d+){3,12}"))
)
_TOLERANCE = 1e-3
_TOGETHER = 200  # Requests that are compared at a time.


class Job(NamedTuple):
    rid: str
    prompt: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    """Tokens, log-probabilities, and how the answer ended."""

    tokens: list[int]
    logprobs: list[float]
    end: Any

    def equals(self, other: Answer) -> bool:
        return (self.tokens, self.end, len(self.logprobs)) == (
            other.tokens,
            other.end,
            len(other.logprobs),
        ) and all(
            abs(one - two) <= _TOLERANCE
            for one, two in zip(self.logprobs, other.logprobs, strict=True)
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.speculation_engines", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("--algorithm", default="auto", help="that of the engine with speculation")
    parser.add_argument("--draft", help="a draft model, or a head of eagle3")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5, help="how often the engine is killed")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no requests after these")
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> int:
    fixed: dict[str, Any] = {
        "dtype": options.dtype,
        "num_threads": 1,
        "max_total_tokens": 8192,
        "max_running_requests": 32,
        "piecewise_cuda_graph": False,
        "batch_invariant": options.batch_invariant,
    }
    plain = LLM(options.model, speculative_algorithm="none", **fixed)
    draft = {"speculative_draft_model_path": options.draft} if options.draft else {}
    config = EngineConfig(
        model_path=options.model, speculative_algorithm=options.algorithm, **draft, **fixed
    )
    client = EngineClient(config, load_tokenizer(options.model), log_level="error")
    await client.start()
    assert await client.wait_ready(), client.failure
    began, compared, wrong = time.monotonic(), 0, list[str]()
    chunks = -(-options.requests // _TOGETHER)
    killed = {chunk * chunks // max(1, options.kills) for chunk in range(options.kills)}
    for chunk in range(chunks):
        if time.monotonic() - began > options.seconds:
            break
        rng = random.Random(f"{options.seed} {chunk}")
        jobs = [_job(rng, f"{chunk} {number}") for number in range(_TOGETHER)]
        wanted = await asyncio.to_thread(_plain, plain, jobs)
        kill_after = rng.random() if chunk in killed else None
        found = await _supervised(client, jobs, wanted, rng, kill_after)
        for job, one, two in zip(jobs, found, wanted, strict=True):
            if not one.equals(two):
                wrong.append(f"{job}\n  {one}\n  {two}")
        compared += len(jobs)
        if chunk % 5 == 4:
            print(f"{compared} compared, {client.restarts} kills, {len(wrong)} wrong", flush=True)
    stats = client.stats
    await client.stop()
    print("\n".join(wrong[:10]))
    print(
        f"the last process accepted {stats.accepted_tokens_total} of {stats.draft_tokens_total} "
        f"proposals and gave {stats.generation_tokens_total} tokens"
    )
    print(f"{compared} answers compared, {client.restarts} kills, {len(wrong)} wrong")
    return 1 if wrong else 0


def _job(rng: random.Random, rid: str) -> Job:
    """Return a request with the same answer each time: greedy, or with a seed."""
    count = rng.randint(1, 60)
    params: dict[str, Any] = {
        "max_new_tokens": count,
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.2)),
        "seed": rng.randrange(2**31),
        "ignore_eos": rng.random() < 0.5,
    }
    for name, values in (
        ("top_p", (0.9, 0.5)),
        ("top_k", (3, 40)),
        ("min_p", (0.05,)),
        ("repetition_penalty", (1.2,)),
        ("frequency_penalty", (0.5,)),
        ("presence_penalty", (0.5,)),
        ("logit_bias", ({17: 4.0, 40: -50.0},)),
        ("min_new_tokens", (min(8, count),)),
        ("stop_token_ids", ([20, 21], [300])),
        ("logprobs", (0, 3)),
        ("grammar", _GRAMMARS),
    ):
        if rng.random() < 0.15:
            params[name] = rng.choice(values)
    # Prompts of few tokens, in which and with which others repeat themselves.
    prompt = rng.choices(range(20, 40), k=rng.randint(1, 12)) * rng.choice((1, 1, 2, 5))
    return Job(rid, prompt, SamplingParams(**params))


def _plain(llm: LLM, jobs: list[Job]) -> list[Answer]:
    found: dict[str, list[TokenOutput]] = {job.rid: [] for job in jobs}
    for job in jobs:
        llm.core.add(GenerateRequest(rid=job.rid, input_ids=job.prompt, params=job.params))
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            found[output.rid].append(output)
    return [_answer(each) for each in found.values()]


async def _supervised(
    client: EngineClient,
    jobs: list[Job],
    wanted: list[Answer],
    rng: random.Random,
    kill_after: float | None,
) -> list[Answer]:
    """Return the answers of the engine process. It is killed after this share of the tokens."""
    total, left = sum(len(each.tokens) for each in wanted), [0]
    if kill_after is not None:
        left[0] = int(total * kill_after) + 1

    async def ask(job: Job, guessed: list[int]) -> Answer:
        outputs, ended = list[RequestOutput](), asyncio.Event()

        def deliver(output: RequestOutput) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                ended.set()
            if left[0] > 0:
                left[0] -= len(output.token_ids)
                if left[0] <= 0 and client.engine_pid is not None:
                    os.kill(client.engine_pid, signal.SIGKILL)

        make: Callable[[Tokenizer], RequestState] = lambda tokenizer: RequestState(  # noqa: E731
            job.rid, job.prompt, job.params, tokenizer, prediction_ids=guessed
        )
        state = make(client.tokenizer)
        state.deliver = deliver
        client.add_request(state)
        await ended.wait()
        return _answer(outputs)

    guesses = [_guess(rng, each.tokens) for each in wanted]
    return list(await asyncio.gather(*map(ask, jobs, guesses)))


def _guess(rng: random.Random, answer: list[int]) -> list[int]:
    """Return a prediction in a third of all cases: the answer with some tokens changed."""
    if rng.random() < 0.67:
        return []
    return [token if rng.random() < 0.97 else rng.randrange(20, 40) for token in answer]


def _answer(outputs: list[Any]) -> Answer:
    last = outputs[-1]
    return Answer(
        [token for output in outputs for token in output.token_ids],
        [each.logprob for output in outputs for each in output.logprobs or ()],
        (last.finish_reason, last.error),
    )


if __name__ == "__main__":
    sys.exit(main())

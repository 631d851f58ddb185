"""The mean log-probability of worked answers, as servers tell that of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from piecework.bench.client import Client, RequestFailed
from piecework.bench.datasets import Question
from piecework.bench.quality import mean_logprob
from piecework.bench.target import Target

QUESTIONS = [Question("one", "a b"), Question("three", "c")]


class Told(Client):
    """Splits a prompt into words, the n-th of which has log-probability -n; and one token more."""

    def __init__(self) -> None:
        self.target = Target(base_url="http://127.0.0.1:1", model="toy")

    async def post(self, path: str, body: Any) -> Any:
        assert path == "/v1/completions" and body["echo"] and body["max_tokens"] == 1
        choices = []
        for prompt in body["prompt"]:
            words = f"{prompt} more".split(" ")
            places = [len(" ".join(words[:n])) for n in range(len(words))]
            values: list[float | None] = [None, *(-float(n) for n in range(1, len(words)))]
            choices.append({"logprobs": {"token_logprobs": values, "text_offset": places}})
        return {"choices": choices}


class Refusing(Told):
    async def post(self, path: str, body: Any) -> Any:
        raise RequestFailed("HTTP 400", "echo is not supported")


def test_the_tokens_of_the_answers_count_and_no_others() -> None:
    # "Question: one\nAnswer: a b": the words a and b are the second and third.
    assert asyncio.run(mean_logprob(Told(), QUESTIONS)) == (-2.0 - 3.0 - 2.0) / 3


def test_a_server_that_does_not_tell_has_no_figure() -> None:
    assert asyncio.run(mean_logprob(Refusing(), QUESTIONS)) is None

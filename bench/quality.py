"""The log-probability of GSM8K's worked answers, which measures the loss of a number format."""

from __future__ import annotations

from collections.abc import Sequence

from .client import Client, RequestFailed
from .datasets import Question

_AT_ONCE = 4


async def mean_logprob(client: Client, questions: Sequence[Question]) -> float | None:
    """Return the mean log-probability of the answers' tokens, each answer after its question, in
    nats per token.

    Return None if the server does not send log-probabilities of prompts (`echo` of
    /v1/completions).
    """
    found: list[float] = []
    for first in range(0, len(questions), _AT_ONCE):
        asked = questions[first : first + _AT_ONCE]
        heads = [f"Question: {question}\nAnswer:" for question, _ in asked]
        prompts = [f"{head} {each.answer}" for head, each in zip(heads, asked, strict=True)]
        body = {
            "model": client.target.model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        try:
            choices = (await client.post("/v1/completions", body))["choices"]
            for choice, head, prompt in zip(choices, heads, prompts, strict=True):
                told = choice["logprobs"]
                found += [
                    value
                    for value, place in zip(
                        told["token_logprobs"], told["text_offset"], strict=True
                    )
                    # The generated token follows the prompt.
                    if len(head) <= place < len(prompt)
                ]
        except (RequestFailed, LookupError, TypeError, ValueError):
            return None
    return sum(found) / len(found) if found else None

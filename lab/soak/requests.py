"""Requests of mixed shapes for a soak test, each a function of the seed and its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ...bench.apis import GenerationCall
from ...bench.target import Api
from ...bench.workloads import WORDS

LONGEST_WAIT = 3.0  # Maximum seconds until a client leaves or aborts.
_SHARED_BEGINNINGS = 4
# Some occur soon, and one almost never.
_STOPS = (("\n",), (" the",), ("e", "a"), (".", "?", "!"), ("zzzz",), (" and", " of", "ing"))


class Fate(StrEnum):
    """What the client does with a request."""

    READ = "read"
    DISCONNECT = "disconnect"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """A request. A client that disconnects or aborts does so `wait` seconds after sending it."""

    api: Api
    call: GenerationCall
    fate: Fate = Fate.READ
    wait: float = 0.0

    @property
    def deterministic(self) -> bool:
        """Whether the same request always has the same answer."""
        return self.call.temperature == 0.0 or self.call.seed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The composition of requests. Rates are shares of all requests. Without `vocab_size` there are
    no prompts of token ids.
    """

    apis: Sequence[Api]
    seed: int = 0
    disconnect_rate: float = 0.1
    abort_rate: float = 0.05
    max_prompt_words: int = 400
    max_new_tokens: int = 64
    vocab_size: int | None = None

    def request(self, number: int) -> SoakRequest:
        """Return request `number`, which is always the same."""
        rng = random.Random(f"{self.seed} {number}")
        api = rng.choice(list(self.apis))
        call = GenerationCall(
            prompt=self._prompt(api, rng),
            max_tokens=rng.randint(1, self.max_new_tokens),
            stop=rng.choice(_STOPS) if rng.random() < 0.3 else (),
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            logprobs=rng.choice((0, 1, 5)) if rng.random() < 0.25 else None,
            ignore_eos=rng.random() < 0.3,
            stream=rng.random() < 0.5,
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            seed=rng.randrange(2**31) if rng.random() < 0.6 else None,
        )
        return self._with_fate(SoakRequest(api=api, call=call), rng)

    def _prompt(self, api: Api, rng: random.Random) -> str | list[int]:
        """Return a short, medium or long prompt. Half of them begin with one of a few common
        prefixes.
        """
        longest = self.max_prompt_words
        length = rng.randint(1, rng.choice((max(1, longest // 25), max(1, longest // 5), longest)))
        if self.vocab_size is not None and api is not Api.CHAT and rng.random() < 0.2:
            return rng.choices(
                range(self.vocab_size // 20, self.vocab_size - self.vocab_size // 20), k=length
            )
        beginning: list[str] = []
        if rng.random() < 0.5:
            shared = random.Random(f"{self.seed} beginning {rng.randrange(_SHARED_BEGINNINGS)}")
            beginning = shared.choices(WORDS, k=longest)[: length // 2]
        return " ".join(beginning + rng.choices(WORDS, k=length - len(beginning)))

    def _with_fate(self, request: SoakRequest, rng: random.Random) -> SoakRequest:
        draw = rng.random()
        # Uniform in the logarithm: many moments are in the first milliseconds, when a request is
        # parsed and queued.
        wait = 0.001 * (LONGEST_WAIT / 0.001) ** rng.random()
        if draw < self.disconnect_rate:
            return replace(request, fate=Fate.DISCONNECT, wait=wait)
        if draw < self.disconnect_rate + self.abort_rate:
            # The OpenAI endpoints send a request's id in the stream. For /generate the client
            # chooses it.
            stream = request.call.stream or request.api is not Api.GENERATE
            return replace(
                request, fate=Fate.ABORT, wait=wait, call=replace(request.call, stream=stream)
            )
        return request

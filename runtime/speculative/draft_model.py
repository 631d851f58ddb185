"""A smaller model with the same vocabulary that guesses the next tokens. See "Fast Inference from
Transformers via Speculative Decoding" (arXiv:2211.17192).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from ..cache.kv_cache import KVCache
from ..core.generation import GenerateRequest
from ..core.request import Request, Scheduled
from ..executor.runner import Runner
from ..sampling.logits_processors import processors_for
from .step_costs import StepCosts

logger = logging.getLogger(__name__)

_CATCH_UP = 256  # Most tokens of prompts and answers that the draft model computes per step.


class DraftModel:
    """Drafts of a second model, which has a KV cache of its own.

    Each request has a twin in the draft's cache: the same tokens, seed and filters. The twin draws
    with the noise that the model will draw with, because noise depends on seed and position only.
    Similar distributions therefore often give the same token, also at high temperatures.

    `vocab_size` is that of the model that verifies.
    """

    name = "draft"

    def __init__(self, runner: Runner, cache: KVCache, *, steps: int, vocab_size: int) -> None:
        self.steps = steps
        self._runner, self._cache = runner, cache
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._twins: dict[Request, Request] = {}
        self._costs = StepCosts()
        self._failed = False

    def draft(
        self, running: list[Request], counts: Mapping[Request, int]
    ) -> dict[Request, list[int]]:
        """See `Drafter`. If the draft model raises, there are no more drafts."""
        for request in set(self._twins).difference(running):
            self._release(request)
        if self._failed or not counts:
            return {}
        try:
            return self._draft(counts)
        except Exception:
            logger.exception("the draft model fails; answers continue without drafts")
            self._failed = True
            for request in list(self._twins):
                self._release(request)
            return {}

    def seconds(self, requests: int) -> float:
        """See `Drafter`."""
        if self._failed:
            return float("inf")
        # The first drafts are made to be measured.
        return self._costs.seconds(requests) if self._costs.is_known else 0.0

    def drop_finished(self) -> None:
        """See `Drafter`."""
        for request in [each for each in self._twins if each.finished]:
            self._release(request)

    def check(self) -> None:
        """See `Drafter`."""
        self._cache.check(self._twins.values())

    def _release(self, request: Request) -> None:
        self._cache.release(self._twins.pop(request))

    def _draft(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        # 1. The twins compute the tokens that they lack, long prompts in parts. A twin that still
        # lacks some, or that finds no page, drafts in a later step.
        budget = _CATCH_UP
        first: list[Scheduled] = []
        for request in counts:
            twin = self._twin(request)
            missing = twin.num_tokens - twin.num_computed
            new = self._cache.limit(twin, min(missing, budget))
            if new > 0 and self._cache.reserve(twin, new):
                first.append(Scheduled(twin, new))
                budget -= new
        owners = {self._twins[request]: request for request in counts}
        drafts: dict[Request, list[int]] = {}
        scheduled = first
        # 2. Each step drafts one more token.
        while scheduled:
            began = time.perf_counter()
            drafted = self._compute(scheduled)
            if all(new == 1 for _, new in scheduled):
                self._costs.add(len(scheduled), time.perf_counter() - began)
            scheduled = []
            for twin, token in drafted:
                request = owners[twin]
                # `NO_TOKEN` is negative.
                if not 0 <= token < self._vocab_size or token in request.stop_ids:
                    continue
                draft = drafts.setdefault(request, [])
                draft.append(token)
                if len(draft) < counts[request] and self._cache.reserve(twin, 1):
                    scheduled.append(Scheduled(twin, 1))
        return drafts

    def _compute(self, scheduled: list[Scheduled]) -> list[tuple[Request, int]]:
        """Compute a step. Return the twins that got a token, with the token appended."""
        step = self._runner.execute(scheduled, None)
        for twin, new in scheduled:
            self._cache.advance(twin, new)
        for row, sampler in enumerate(step.samplers):
            assert isinstance(sampler, Request)
            sampler.add_placeholder(row)
        drafted = []
        for result in step.read():
            if result.tokens:
                (token,) = result.tokens
                result.request.resolve([max(token, 0)])
                drafted.append((result.request, token))
        return drafted

    def _twin(self, request: Request) -> Request:
        """Return the request's twin with the request's tokens."""
        twin = self._twins.get(request)
        if twin is not None:
            twin.follow(request.tokens)
            return twin
        tokens = request.tokens.tolist()
        params = replace(
            request.params,
            grammar=None,
            logprobs=None,
            prompt_logprobs=None,
            thinking_budget=None,
            min_new_tokens=0,
            # Penalties count a growing text, and a draft goes back.
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_new_tokens=request.max_tokens,
            logit_bias={
                token: bias
                for token, bias in request.params.logit_bias.items()
                if token < self._vocab_size
            },
        )
        twin = Request(
            GenerateRequest(
                rid=request.rid,
                input_ids=tokens[: request.num_prompt],
                output_ids=tokens[request.num_prompt :],
                params=params,
            ),
            seed=request.seed,
            stop_ids=frozenset(),
            max_tokens=request.max_tokens,
            make_processors=processors_for,
        )
        self._twins[request] = twin
        self._cache.attach(twin)
        return twin

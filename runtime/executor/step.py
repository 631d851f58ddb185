"""A step from its schedule to its results: launched at once, read when the device is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.collectives import Group
from ...kernels.staging import HostCopy, to_device
from ..core.batch import Batch, Layout
from ..core.generation import TokenLogprob
from ..core.request import Request, Scheduled
from ..sampling.logprobs import gather_logprobs, gather_ranks, read_logprobs, with_ranks
from ..sampling.sampler import NO_TOKEN, KnownSamples, Samples, choose, sample

_LOGIT_ROWS = 64
"""Prompt positions whose logits are held at once: 64 rows of a vocabulary of 150,000 take 38 MB,
and as much again for their log-probabilities.
"""


class Forward(Protocol):
    """What a step needs of a model."""

    device: torch.device
    layout: Layout
    group: Group | None
    """Of the ranks, each of which gets the tokens that rank 0 samples; None: there are no others.
    """

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of a step; writes keys and values of its tokens."""
        ...

    def choose(self, batch: Batch) -> list[int] | None:
        """The tokens [N] of a step's samplers, `NO_TOKEN` where logits are not finite, where
        they are found with its forward; None: nothing is done.
        """
        ...

    def forward_to_logits(self, batch: Batch) -> torch.Tensor | None:
        """Their logits [N, V] float32 likewise; a tensor of its own."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [N, V] float32 of hidden [N, hidden]; a tensor of its own. None on a rank other
        than 0.
        """
        ...

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] float32 of this rank's stretch of hidden [N, hidden], where each has R =
        ceil(N / ranks) rows; those behind the last row mean nothing.
        """
        ...


class StepTokens(NamedTuple):
    """What a step gave one request: no token where it computed a chunk of its prompt or no more
    than log-probabilities, and else one or several.
    """

    request: Request
    tokens: list[int]
    """The last may be `NO_TOKEN`."""
    logprobs: list[TokenLogprob] | None
    """One a token, where asked for."""
    reached_end: bool
    """Whether all tokens of the request that were known at the launch are computed."""


class PendingStep:
    """One step, which the device runs while the host goes on. `samplers`: the requests that get a
    token, each of which gets a placeholder until the step is read.
    """

    def __init__(
        self, model: Forward, scheduled: list[Scheduled], previous: PendingStep | None
    ) -> None:
        """`previous`: the step in flight, whose tokens this one begins with."""
        sampled = (
            previous.samples.tokens
            if previous is not None and previous.samples is not None
            else None
        )
        batch = model.layout.batch(scheduled, sampled)
        self.scheduled = scheduled
        self.samplers = batch.samplers
        self._reach_end = batch.reach_end
        self.samples: Samples | KnownSamples | None = None
        self._prompt_rows: list[_PromptRows] = []
        chosen = model.choose(batch) if batch.asks_no_more else None
        if chosen is not None:
            self.samples = KnownSamples(chosen)
        else:
            self._compute(model, batch, sampled)

    @torch.inference_mode()
    def _compute(self, model: Forward, batch: Batch, sampled: torch.Tensor | None) -> None:
        # Of a prompt whose log-probabilities are wanted, hidden states are looked at.
        if batch.samplers and not any(request.prompt_logprobs_due for request, _ in self.scheduled):
            logits = model.forward_to_logits(batch)
            if logits is not None:
                self.samples = sample(logits, batch.samplers, sampled)
                return
        hidden = model.forward(batch)
        self._prompt_rows = list(_prompt_rows(model, self.scheduled, hidden))
        if batch.samplers:
            rows = hidden.index_select(0, batch.sample_rows)
            self.samples = _sample(model, rows, batch.samplers, sampled)

    @property
    def is_of_use(self) -> bool:
        """Whether a request of it still goes on."""
        return not all(request.finished for request, _ in self.scheduled)

    def read(self) -> list[StepTokens]:
        """What each request of the step was given, once the device is done; prompts'
        log-probabilities go to their requests.
        """
        for rows in self._prompt_rows:
            rows.read()
        sampled = iter([] if self.samples is None else self.samples.read())
        results = []
        for (request, _), ended in zip(self.scheduled, self._reach_end, strict=True):
            if ended and request.params.max_new_tokens > 0:
                token, logprob = next(sampled)
                logprobs = None if logprob is None else [logprob]
                results.append(StepTokens(request, [token], logprobs, True))
            else:
                results.append(StepTokens(request, [], None, ended))
        return results


def _sample(
    model: Forward, hidden: torch.Tensor, requests: list[Request], sampled: torch.Tensor | None
) -> Samples:
    """The next token of each request from its row [N, hidden], on every rank."""
    if model.group is not None and _may_be_shared_out(requests, model.group.size):
        return _sample_own(model, model.group, hidden, requests)
    logits = model.compute_logits(hidden)
    if logits is not None:
        samples = sample(logits, requests, sampled)
        if model.group is not None:
            model.group.broadcast(samples.chosen)
        return samples
    assert model.group is not None
    chosen = torch.empty(len(requests), dtype=torch.int64, device=model.device)
    model.group.broadcast(chosen)
    return Samples(chosen, [], [])


def _may_be_shared_out(requests: list[Request], ranks: int) -> bool:
    """Whether each rank may choose the tokens of some rows: what requests change about their
    logits, and log-probabilities, are rank 0's.
    """
    return len(requests) >= ranks and not any(
        request.processors or request.params.logprobs is not None for request in requests
    )


def _sample_own(
    model: Forward, group: Group, hidden: torch.Tensor, requests: list[Request]
) -> Samples:
    """Each rank chooses for a stretch of the rows, and is told what the others chose."""
    logits = model.compute_own_logits(hidden)
    own = requests[group.rank * len(logits) : (group.rank + 1) * len(logits)]
    chosen = torch.full((len(logits),), NO_TOKEN, dtype=torch.int64, device=model.device)
    if own:
        chosen[: len(own)] = choose(logits[: len(own)], own)
    everyones = group.all_gather(chosen)[: len(requests)]
    return Samples(everyones, [], [])


class _PromptRows(NamedTuple):
    """Log-probabilities of a stretch of a prompt; `targets`: its tokens."""

    request: Request
    targets: list[int]
    copy: HostCopy

    def read(self) -> None:
        top = self.request.params.prompt_logprobs or 0
        ranks, *gathered = self.copy.wait()
        entries = read_logprobs(gathered, self.targets, [top] * len(self.targets))
        self.request.prompt_logprobs += with_ranks(entries, ranks)


def _prompt_rows(
    model: Forward, scheduled: list[Scheduled], hidden: torch.Tensor
) -> Iterator[_PromptRows]:
    """The logits at position p speak of the token at p + 1; position 0 has nothing before it."""
    row = 0
    for request, num_new in scheduled:
        if request.prompt_logprobs_due:
            start, first = request.params.prompt_logprobs_start, request.num_computed
            if first == 0:
                request.prompt_logprobs = [None] if start == 0 else []
            wanted = range(max(first, start - 1), min(first + num_new, request.num_prompt - 1))
            # Small tensors that stay between large ones that go would fragment the heap.
            whole: list[torch.Tensor] = []
            for begin in range(wanted.start, wanted.stop, _LOGIT_ROWS):
                end = min(begin + _LOGIT_ROWS, wanted.stop)
                logits = model.compute_logits(hidden[row + begin - first : row + end - first])
                if logits is None:
                    continue
                targets = np.ascontiguousarray(request.tokens[begin + 1 : end + 1])
                (tokens,) = to_device([targets], logits.device)
                gathered = [
                    gather_ranks(logits, tokens),
                    *gather_logprobs(logits, tokens, request.params.prompt_logprobs or 0),
                ]
                if not whole:
                    whole = [each.new_empty(len(wanted), *each.shape[1:]) for each in gathered]
                for place, each in zip(whole, gathered, strict=True):
                    place[begin - wanted.start : end - wanted.start] = each
                del logits, gathered, each
            if whole:
                asked = request.tokens[wanted.start + 1 : wanted.stop + 1].tolist()
                yield _PromptRows(request, asked, HostCopy(whole))
        row += num_new

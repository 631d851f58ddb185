"""A step from its schedule to its results: launched at once, read when the device is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.collectives import Group
from ...kernels.staging import HostCopy, to_device
from ..core.ahead import Sampler
from ..core.batch import Batch, Layout
from ..core.generation import TokenLogprob
from ..core.request import Request, Scheduled
from ..sampling.logprobs import gather_logprobs, gather_ranks, read_logprobs, with_ranks
from ..sampling.sampler import NO_TOKEN, KnownSamples, Sampled, Samples, choose, sample

# Prompt positions whose logits are held at once. 64 rows of a vocabulary of 150,000 take 38 MB, and
# their log-probabilities as much again.
_LOGIT_ROWS = 64


class Forward(Protocol):
    """The model as a step calls it. `group` is that of all ranks, None if there is one rank."""

    device: torch.device
    layout: Layout
    group: Group | None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step. Write its keys and values."""
        ...

    def choose(self, batch: Batch) -> list[int] | None:
        """Compute a step and choose the tokens [N] of its samplers in one call.

        A token is `NO_TOKEN` if its logits are not finite. Return None, and compute nothing, if the
        step cannot be computed that way.
        """
        ...

    def forward_to_logits(self, batch: Batch) -> torch.Tensor | None:
        """Compute a step and the logits [N, V] float32 of its samplers in one call, or return None.

        The tensor is new.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [N, V] float32 of hidden [N, hidden] in a new tensor, or None on a rank
        other than 0.
        """
        ...

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] float32 of this rank's rows of hidden [N, hidden].

        Every rank has R = ceil(N / ranks) rows. Rows after the last one of N are undefined.
        """
        ...


class StepTokens(NamedTuple):
    """The tokens that a step gave one request.

    Attributes:
        tokens: Empty if the step computed a chunk of the prompt, or log-probabilities only. With
            proposals, the accepted ones and the token after them. The last token may be `NO_TOKEN`.
        logprobs: One per token, if asked for.
        reached_end: Whether all tokens of the request that were known at the launch are computed.
    """

    request: Request
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    reached_end: bool


class PendingStep:
    """A launched step, which the device runs while the host continues.

    `samplers` are those of the batch. Until the step is read, each request in it has a placeholder.
    """

    def __init__(
        self, model: Forward, scheduled: list[Scheduled], previous: PendingStep | None
    ) -> None:
        """Launch the step. Placeholders take their tokens from `previous`, the step in flight."""
        sampled = (
            previous.samples.tokens
            if previous is not None and previous.samples is not None
            else None
        )
        batch = model.layout.batch(scheduled, sampled)
        self.scheduled = scheduled
        self.samplers = batch.samplers
        self._reach_end = batch.reach_end
        self._proposals = [request.proposals for request, _ in scheduled]
        self.has_proposals = any(self._proposals)
        self.num_tokens = batch.num_tokens
        self.is_overlapped, self.began = previous is not None, time.perf_counter()
        # Whether all requests continue their answers.
        self.is_decode = all(batch.reach_end) and batch.has_decodes
        self.has_prompts = any(each.num_computed < each.num_prompt for each, _ in scheduled)
        self.is_mixed = self.has_prompts and batch.has_decodes
        # Whether answers have rows that give no token: tokens that a grammar forced, or that are
        # computed again. Such rows cost less than others.
        self.has_given_rows = batch.num_tokens > len(batch.samplers) and any(
            request.num_computed >= request.num_prompt and num_new > 1 + len(request.proposals)
            for request, num_new in scheduled
        )
        self.samples: Samples | KnownSamples | None = None
        self._prompt_rows: list[_PromptRows] = []
        chosen = model.choose(batch) if batch.asks_no_more else None
        if chosen is not None:
            self.samples = KnownSamples(chosen)
        else:
            self._compute(model, batch, sampled)

    @torch.inference_mode()
    def _compute(self, model: Forward, batch: Batch, sampled: torch.Tensor | None) -> None:
        # Log-probabilities of prompts need the hidden states of all rows.
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
    def waits(self) -> bool:
        """Whether `read` waits for the device. Nothing is read of chunks inside of prompts."""
        return self.samples is not None or bool(self._prompt_rows)

    @property
    def is_of_use(self) -> bool:
        """Whether a request of the step has not ended."""
        return not all(request.finished for request, _ in self.scheduled)

    def read(self) -> list[StepTokens]:
        """Wait for the device and return the tokens of each request.

        Log-probabilities of prompts are added to their requests.
        """
        for rows in self._prompt_rows:
            rows.read()
        sampled = iter([] if self.samples is None else self.samples.read())
        results = []
        for (request, _), ended, proposals in zip(
            self.scheduled, self._reach_end, self._proposals, strict=True
        ):
            if ended and request.params.max_new_tokens > 0:
                own = [next(sampled) for _ in range(1 + len(proposals))]
                own = own[: 1 + _num_accepted(own, proposals)]
                logprobs = [each.logprob for each in own if each.logprob is not None]
                tokens = [each.token for each in own]
                results.append(StepTokens(request, tokens, logprobs or None, True))
            else:
                results.append(StepTokens(request, [], None, ended))
        return results


def _num_accepted(rows: list[Sampled], proposals: list[int]) -> int:
    """Return how many proposals equal the tokens sampled in their place.

    The token after a proposal was sampled as if the proposal had been chosen, so it is the
    request's next token only if it was.
    """
    for count, proposal in enumerate(proposals):
        # Logits after a proposal that are not finite are computed again as the first of a step.
        if rows[count].token != proposal or rows[count + 1].token == NO_TOKEN:
            return count
    return len(proposals)


def _sample(
    model: Forward, hidden: torch.Tensor, requests: list[Sampler], sampled: torch.Tensor | None
) -> Samples:
    """Sample the next token of each request from its row of hidden [N, hidden], on every rank."""
    # Each rank may choose the tokens of some rows, except of requests with logits processors or
    # log-probabilities, which only rank 0 computes.
    group = model.group
    if (
        group is not None
        and len(requests) >= group.size
        and not any(
            request.processors or request.params.logprobs is not None for request in requests
        )
    ):
        own_logits = model.compute_own_logits(hidden)
        rows = len(own_logits)
        own = requests[group.rank * rows : (group.rank + 1) * rows]
        chosen = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=model.device)
        if own:
            chosen[: len(own)] = choose(own_logits[: len(own)], own)
        return Samples(group.all_gather(chosen)[: len(requests)], [], [])
    logits = model.compute_logits(hidden)
    if logits is not None:
        samples = sample(logits, requests, sampled)
        if group is not None:
            group.broadcast(samples.chosen)
        return samples
    assert group is not None
    chosen = torch.empty(len(requests), dtype=torch.int64, device=model.device)
    group.broadcast(chosen)
    return Samples(chosen, [], [])


class _PromptRows(NamedTuple):
    """Log-probabilities of a part of a prompt, whose tokens are `targets`."""

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
    """Yield the log-probabilities of prompts, as far as this step computes them.

    The logits at position p are those of the token at p + 1. Position 0 has no log-probability.
    """
    row = 0
    for request, num_new in scheduled:
        if request.prompt_logprobs_due:
            start, first = request.params.prompt_logprobs_start, request.num_computed
            if first == 0:
                request.prompt_logprobs = [None] if start == 0 else []
            wanted = range(max(first, start - 1), min(first + num_new, request.num_prompt - 1))
            # One buffer for all chunks: small tensors between freed large ones fragment the heap.
            buffers: list[torch.Tensor] = []
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
                if not buffers:
                    buffers = [part.new_empty(len(wanted), *part.shape[1:]) for part in gathered]
                for buffer, part in zip(buffers, gathered, strict=True):
                    buffer[begin - wanted.start : end - wanted.start] = part
                del logits, gathered, part
            if buffers:
                asked = request.tokens[wanted.start + 1 : wanted.stop + 1].tolist()
                yield _PromptRows(request, asked, HostCopy(buffers))
        row += num_new

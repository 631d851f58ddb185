"""Processors that change logits before a token is chosen. N rows, V vocabulary size.

    request = Request(message, ..., make_processors=processors_for)
    adjust(logits, requests, sampled)

All changes address the flat logits [N * V], so that a batch takes as many operations as one
request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from ...kernels import ops
from ...kernels.staging import to_device
from ..core.logits_processor import GrammarState, LogitsProcessor, Progress, Rows
from ..core.sampling_params import SamplingParams
from .plug_ins import PlugIn, PlugIns


class Penalties:
    """Repetition, presence and frequency penalties.

    Repetition counts prompt and output, as in CTRL (arXiv:1909.05858). Presence and frequency count
    the output, as in OpenAI's API.
    """

    needs_last_token: ClassVar[bool] = False

    def __init__(self, params: SamplingParams, prompt: npt.NDArray[np.int64]) -> None:
        self._parameters = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._over_prompt = params.repetition_penalty != 1.0
        self._prompt = prompt
        # Created with the first token, because hundreds of long prompts may wait in the queue.
        self._counts: TokenCounts | None = None

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        return cls(params, prompt) if params.penalised else None

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Rows[Self], sampled: torch.Tensor | None) -> None:
        # Places of tokens in the flat logits [E], their counts in the output [E], and every row's
        # penalties [3, N].
        parameters = np.array([[1.0], [0.0], [0.0]], np.float32).repeat(len(logits), 1)
        places, counts = [], []
        for row, own, request in rows:
            parameters[:, row] = own._parameters
            own._counts = own._counts or TokenCounts(own._prompt)
            ids, times = own._counts.of(request.output_tokens, request.ahead)
            if not own._over_prompt:
                said = np.flatnonzero(times)
                ids, times = ids[said], times[said]
            places.append(ids + row * logits.shape[1])
            counts.append(times)
        index, said_times, penalties = to_device(
            [np.concatenate(places), np.concatenate(counts), parameters], logits.device
        )
        in_flight = [
            (row, request.sampled_row) for row, _, request in rows if request.num_placeholders
        ]
        if in_flight:
            assert sampled is not None
            index, said_times = _count_in_flight(
                index, said_times, in_flight, sampled, logits.shape
            )
        repetition, presence, frequency = penalties.index_select(1, index // logits.shape[1])
        flat = logits.view(-1)
        values = flat.index_select(0, index)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - torch.where(said_times > 0, presence + frequency * said_times, 0.0)
        flat.index_copy_(0, index, values)


class Bias:
    """`logit_bias`: adds values to the logits of given tokens."""

    needs_last_token: ClassVar[bool] = False

    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        return cls(params.logit_bias) if params.logit_bias else None

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Rows[Self], sampled: torch.Tensor | None) -> None:
        vocab = logits.shape[1]
        places = np.array([row * vocab + token for row, own, _ in rows for token in own._bias])
        values = np.array([value for _, own, _ in rows for value in own._bias.values()], np.float32)
        logits.view(-1).index_add_(0, *to_device([places, values], logits.device))


class EarlyEndBan:
    """`min_new_tokens`: bans tokens that would end the sequence too early."""

    needs_last_token: ClassVar[bool] = False

    def __init__(self, min_new_tokens: int, stop_ids: frozenset[int]) -> None:
        self._min_new_tokens = min_new_tokens
        self._stop_ids = stop_ids

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        return cls(params.min_new_tokens, stop_ids) if params.min_new_tokens else None

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Rows[Self], sampled: torch.Tensor | None) -> None:
        vocab = logits.shape[1]
        # A model's end token may be outside of its vocabulary, in the row of another request.
        places = [
            row * vocab + token
            for row, own, request in rows
            if request.num_output < own._min_new_tokens
            for token in own._stop_ids
            if 0 <= token < vocab
        ]
        if places:
            (index,) = to_device([np.array(places)], logits.device)
            logits.view(-1).index_fill_(0, index, float("-inf"))


class GrammarMask:
    """Bans tokens that may not follow in the grammar."""

    needs_last_token: ClassVar[bool] = True

    def __init__(self, matcher: GrammarState) -> None:
        self._matcher = matcher

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        return None if matcher is None else cls(matcher)

    @classmethod
    def apply(
        cls,
        logits: torch.Tensor,
        rows: Rows[Self],
        sampled: torch.Tensor | None,
    ) -> None:
        vocab = logits.shape[1]
        bits = np.empty((len(rows), -(-vocab // 32)), np.int32)
        faulty = []
        for place, (row, own, request) in enumerate(rows):
            own._matcher.fill(bits[place], request.ahead)
            faulty += [row] if own._matcher.fault is not None else []
        numbers = np.array([row for row, _, _ in rows])
        ops.mask_logits(logits, *to_device([numbers, bits], logits.device))
        if faulty:
            # These rows get no token. Every rank of the engine learns that.
            (index,) = to_device([np.array(faulty)], logits.device)
            logits.index_fill_(0, index, float("nan"))


# In the order of application.
PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    PlugIn,
    Penalties,
    Bias,
    EarlyEndBan,
    GrammarMask,
)


def processors_for(
    params: SamplingParams,
    prompt: npt.NDArray[np.int64],
    stop_ids: frozenset[int],
    matcher: GrammarState | None = None,
) -> list[LogitsProcessor]:
    """Return the processors of a request. `matcher` is that of its grammar."""
    found = (kind.wanted(params, prompt, stop_ids, matcher) for kind in PROCESSORS)
    return [processor for processor in found if processor is not None]


def with_plug_ins(
    plug_ins: PlugIns,
    params: SamplingParams,
    prompt: npt.NDArray[np.int64],
    stop_ids: frozenset[int],
    matcher: GrammarState | None = None,
) -> list[LogitsProcessor]:
    """Return the processors of a request, and that of the user's classes."""
    own = processors_for(params, prompt, stop_ids, matcher)
    return [*own, plug_ins.of(prompt, params)]


def ban_by_grammar(logits: torch.Tensor, requests: Sequence[Progress]) -> None:
    """Apply only the masks of grammars to the rows [N, V] of requests with a grammar."""
    rows = [
        (row, processor, request)
        for row, request in enumerate(requests)
        for processor in request.processors
        if isinstance(processor, GrammarMask)
    ]
    GrammarMask.apply(logits, rows, None)


def adjust(
    logits: torch.Tensor,
    requests: Sequence[Progress],
    sampled: torch.Tensor | None = None,
    unmasked: Collection[int] = (),
) -> None:
    """Apply each request's processors to its row of the logits [N, V] float32, in place.

    Processors run kind by kind. In rows that stay `unmasked`, masks of grammars are not applied.
    `sampled` is described in `LogitsProcessor.apply`.
    """
    batches: dict[type[LogitsProcessor], list[tuple[int, LogitsProcessor, Progress]]] = {}
    for row, request in enumerate(requests):
        for processor in request.processors:
            if row in unmasked and isinstance(processor, GrammarMask):
                continue
            batches.setdefault(type(processor), []).append((row, processor, request))
    for kind in PROCESSORS:
        if kind in batches:
            kind.apply(logits, batches[kind], sampled)


class TokenCounts:
    """The distinct tokens of a growing sequence, and their counts in its output.

    They are counted as they arrive, so that no step reads the whole sequence.
    """

    def __init__(self, prompt: npt.NDArray[np.int64]) -> None:
        distinct = np.unique(prompt)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._ids = np.concatenate((distinct, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._num_output = 0

    def of(
        self, output: npt.NDArray[np.int64], ahead: Sequence[int] = ()
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the distinct tokens [U] of prompt, `output` and `ahead`, and their counts [U] in
        the last two.

        `output` begins with the tokens that were already counted. The next call may change both
        views.
        """
        for token in output[self._num_output :].tolist():
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._counts[place] += 1.0
        self._num_output = len(output)
        ids, counts = self._ids[: len(self._place)], self._counts[: len(self._place)]
        if not ahead:
            return ids, counts
        # These may be rejected, so they are counted in copies.
        more = list(dict.fromkeys(token for token in ahead if token not in self._place))
        last = {token: len(ids) + number for number, token in enumerate(more)}
        ids = np.concatenate((ids, np.array(more, np.int64)))
        counts = np.concatenate((counts, np.zeros(len(more), np.float32)))
        for token in ahead:
            counts[last[token] if token in last else self._place[token]] += 1.0
        return ids, counts


def _count_in_flight(
    index: torch.Tensor,
    counts: torch.Tensor,
    in_flight: list[tuple[int, int]],
    sampled: torch.Tensor,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one token to each (row, sampled row) of `in_flight`. Return places and counts.

    The host does not know the token, which is sampled[sampled row]. If the row has the token
    already, the token is there twice, with the same count.
    """
    rows, taken = to_device([np.array(part) for part in zip(*in_flight, strict=True)], index.device)
    last = sampled.index_select(0, taken) + rows * shape[1]
    last_of_row = torch.full((shape[0],), -1, dtype=last.dtype, device=last.device).index_copy_(
        0, rows, last
    )
    row_of = index // shape[1]
    again = index == last_of_row.index_select(0, row_of)
    counts = counts + again
    before = torch.zeros(shape[0], device=counts.device).index_add_(
        0, row_of, torch.where(again, counts, 0.0)
    )
    once = before.index_select(0, rows).clamp_(min=1.0)
    return torch.cat((index, last)), torch.cat((counts, once))

"""A head that drafts from the hidden states of the model (EAGLE-3, multi-token prediction)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.staging import to_device
from ..core.ahead import Ahead, Sampler
from ..core.forward_context import PagedAttention
from ..core.padding import RESERVED_PAGE
from ..core.request import Request, Scheduled
from ..models.draft_head import DraftHead
from ..sampling.sampler import choose
from .step_costs import StepCosts

logger = logging.getLogger(__name__)

_MOST_WAITING = 16  # Hidden states of a request that may wait for the next draft.

# Allocates pages for so many more tokens of a request, as far as there is memory.
Reserve = Callable[[Request, int], bool]


class _Followed:
    """The hidden states that the head has not read, of positions from `begin` to `end` - 1."""

    __slots__ = ("_hidden", "begin", "end")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self._hidden: list[torch.Tensor] = []

    def add(self, begin: int, hidden: torch.Tensor) -> None:
        """Add the states [n, columns] of positions from `begin` on. They replace older ones."""
        if self.begin <= begin <= self.end:
            self.cut(begin)
        else:
            # After a prefix that was found in the cache, or after a preemption.
            self.begin, self._hidden = begin, []
        self._hidden.append(hidden)
        self.end = begin + len(hidden)

    def cut(self, end: int) -> None:
        """Forget the states of positions from `end` on."""
        if end < self.end:
            self._hidden = [torch.cat(self._hidden)[: max(0, end - self.begin)]]
            self.end = max(end, self.begin)

    def take(self, end: int) -> torch.Tensor:
        """Remove and return the states of positions before `end`."""
        whole = torch.cat(self._hidden)
        taken, rest = whole.tensor_split([end - self.begin])
        # A copy, because the states of a step are valid during the step only.
        self._hidden, self.begin = [rest.clone()] if len(rest) else [], end
        return taken


class _Rows(NamedTuple):
    """Rows of a request for the head: positions from `begin` on, and the tokens that follow."""

    request: Request
    begin: int
    tokens: Sequence[int]


class HeadDrafter:
    """Drafts of a head. Its keys and values are in the pages of the request.

    The head reads a hidden state together with the next token, so its row of a position is computed
    when the next token is known. Long stretches of prompts are read within their step. Other states
    wait until tokens are drafted.

    A request that continues a cached prefix finds the head's keys of that prefix too. The key of
    the last position may come from another next token, which can only spoil a draft.
    """

    name = "draft"

    def __init__(
        self,
        head: DraftHead,
        attention: PagedAttention,
        *,
        device: torch.device,
        slot_dtype: torch.dtype,
        steps: int,
        reserve: Reserve,
    ) -> None:
        self.steps = steps
        self._head, self._attention = head, attention
        self._device, self._slots = device, np.dtype(str(slot_dtype).removeprefix("torch."))
        self._reserve = reserve
        self._followed: dict[Request, _Followed] = {}
        self._costs = StepCosts()
        self._failed = False

    def observe(self, scheduled: Sequence[Scheduled], hidden: torch.Tensor) -> None:
        """See `Listener`. If the head raises, there are no more drafts."""
        if self._failed:
            return
        try:
            self._observe(scheduled, hidden[:, self._head.first_column :])
        except Exception:
            self._fail()

    def draft(
        self, running: list[Request], counts: Mapping[Request, int]
    ) -> dict[Request, list[int]]:
        """See `Drafter`. If the head raises, there are no more drafts."""
        for request in set(self._followed).difference(running):
            del self._followed[request]
        if self._failed or not counts:
            return {}
        try:
            return self._draft(counts)
        except Exception:
            self._fail()
            return {}

    def seconds(self, requests: int) -> float:
        """See `Drafter`."""
        if self._failed:
            return float("inf")
        # The first drafts are made to be measured.
        return self._costs.seconds(requests) if self._costs.is_known else 0.0

    def drop_finished(self) -> None:
        """See `Drafter`."""
        for request in [each for each in self._followed if each.finished]:
            del self._followed[request]

    def check(self) -> None:
        """See `Drafter`."""
        assert not any(request.finished for request in self._followed)

    def _fail(self) -> None:
        logger.exception("the head that drafts tokens fails; answers continue without drafts")
        self._failed = True
        self._followed.clear()

    def _observe(self, scheduled: Sequence[Scheduled], hidden: torch.Tensor) -> None:
        rows, states, first = [], [], 0
        for request, num_new in scheduled:
            begin, own = request.num_computed, hidden[first : first + num_new]
            first += num_new
            followed = self._followed.setdefault(request, _Followed(begin))
            is_long = followed.end - followed.begin + num_new > _MOST_WAITING
            followed.add(begin, own if is_long else own.clone())
            if is_long:
                # The token after a row must be known.
                end = max(followed.begin, min(followed.end, request.num_known - 1))
                tokens = request.tokens[followed.begin + 1 : end + 1]
                rows.append(_Rows(request, followed.begin, tokens.tolist()))
                states.append(followed.take(end))
        if any(map(len, states)):
            self._compute(
                [each for each in rows if each.tokens], self._head.combine(torch.cat(states))
            )

    @torch.inference_mode()
    def _draft(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        began = time.perf_counter()
        rows, states, limits = [], [], {}
        for request, count in counts.items():
            followed, known = self._followed.get(request), request.num_tokens - 1
            if followed is None:
                continue
            # Proposals that were rejected had states too.
            followed.cut(known)
            # After tokens that a grammar forced, the state of the last one is not known yet.
            if not followed.begin < followed.end == known:
                continue
            self._reserve(request, request.num_tokens - request.num_computed + count)
            room = len(request.pages) * self._attention.pool.page_size - known
            limits[request] = min(count, 1 + room)
            tokens = request.tokens[followed.begin + 1 : known + 1]
            rows.append(_Rows(request, followed.begin, tokens.tolist()))
            states.append(followed.take(known))
        drafts: dict[Request, list[int]] = {request: [] for request in limits}
        if not rows:
            return drafts
        state = self._compute(rows, self._head.combine(torch.cat(states)))
        lasts = np.cumsum([len(each.tokens) for each in rows]) - 1
        (index,) = to_device([lasts], self._device)
        state, requests = state.index_select(0, index), list(limits)
        while requests:
            samplers: list[Sampler] = [Ahead(each, len(drafts[each])) for each in requests]
            chosen = choose(self._head.compute_logits(state), samplers).tolist()
            self._costs.add(len(requests), time.perf_counter() - began)
            began, kept = time.perf_counter(), []
            for row, (request, token) in enumerate(zip(requests, chosen, strict=True)):
                # `NO_TOKEN` is negative.
                if token >= 0 and token not in request.stop_ids:
                    drafts[request].append(token)
                    if len(drafts[request]) < limits[request]:
                        kept.append(row)
            requests = [requests[row] for row in kept]
            if requests:
                (index,) = to_device([np.array(kept)], self._device)
                rows = [
                    _Rows(each, each.num_tokens + len(drafts[each]) - 2, drafts[each][-1:])
                    for each in requests
                ]
                state = self._compute(rows, state.index_select(0, index))
        return drafts

    def _compute(self, rows: list[_Rows], states: torch.Tensor) -> torch.Tensor:
        """Return the head's states [T, hidden] of rows, given those before them."""
        size = self._attention.pool.page_size
        positions = [np.arange(each.begin, each.begin + len(each.tokens)) for each in rows]
        most = max(int(own[-1]) // size for own in positions) + 1
        tables = [each.request.pages[:most] for each in rows]
        table = np.array(
            [pages + [RESERVED_PAGE] * (most - len(pages)) for pages in tables], self._slots
        )
        slots = [
            pages[own // size].astype(np.int64) * size + own % size
            for pages, own in zip(table, positions, strict=True)
        ]
        ids = np.concatenate([np.array(each.tokens, np.int64) for each in rows])
        arrays = [ids, np.concatenate(positions), table]
        arrays.append(np.concatenate(slots).astype(self._slots, copy=False))
        input_ids, places, block_table, slot_mapping = to_device(arrays, self._device)
        metadata = AttentionMetadata(
            query_lens=[len(own) for own in positions],
            seq_lens=[int(own[-1]) + 1 for own in positions],
            block_table=block_table,
            slot_mapping=slot_mapping,
        )
        with self._attention.step(metadata):
            result: torch.Tensor = self._head(input_ids, places, states)
        return result

"""The tensors of one step with T tokens and B requests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.staging import is_at_hand, to_device
from ...kernels.step_parts import StepCall
from .ahead import Sampler, with_proposals
from .page_tables import KeptTables, TableRows, new_tables, numpy_dtype
from .request import Request, Scheduled
from .step_images import StepImages
from .turns import turns_of


def digest(scheduled: list[Scheduled]) -> tuple[int, int, int]:
    """Return (requests, tokens, checksum) of a plan. Two different plans give different values."""
    plan = [
        (request.rid, request.num_computed, num_new, len(request.pages), request.pages[-1])
        for request, num_new in scheduled
    ]
    tokens = sum(num_new for _, num_new in scheduled)
    return len(plan), tokens, zlib.crc32(repr(plan).encode())


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tensors of one step. `Layout` may write the next step into the same object.

    Attributes:
        input_ids, positions: [T] int64, request after request.
        samplers: Requests that get a token, each followed by itself after each of its proposals.
            Their logits are those of rows `sample_rows`.
        asks_no_more: Whether samplers want only a token: no processor, no log-probability.
        reach_end: By request: whether the step computes the request's last token.
        state_copies: Pairs of slots (from, to), copied before the step.
        snapshots: Pairs of slots (from, to), copied after the step.
        call: The arguments of the native step, reused for the next step.
        adapter_slots: [T] int32: the slot of each token's adapter, or -1. None: no token has one.
        turns: [T] int64: the positions by which the model rotates. `positions`, unless an image
            before a token takes fewer positions than tokens (M-RoPE).
        images: The rows of images. None: there are none.
    """

    scheduled: list[Scheduled]
    input_ids: torch.Tensor
    positions: torch.Tensor
    turns: torch.Tensor
    metadata: AttentionMetadata
    samplers: list[Sampler]
    sample_rows: torch.Tensor
    asks_no_more: bool
    reach_end: list[bool]
    state_copies: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]
    num_tokens: int
    call: StepCall | None = None
    adapter_slots: torch.Tensor | None = None
    images: StepImages | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return self.num_tokens == len(self.scheduled)

    @property
    def has_decodes(self) -> bool:
        """Whether a request continues after its prompt: with one token, or with several tokens that
        its grammar forced or that were proposed.
        """
        return self.is_decode or any(
            request.num_computed >= request.num_prompt for request, _ in self.scheduled
        )


class _Rows(NamedTuple):
    """The tokens [T] of a step, their positions, the last row of each request, and for each page
    table the slots of the tokens.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    last_rows: list[int]
    slots: list[npt.NDArray[np.int64]]


def _lay_out(
    scheduled: list[Scheduled],
    seq_lens: list[int],
    tables: list[TableRows],
    page_size: int,
) -> _Rows:
    spans = [
        request.span(end - num_new, end)
        for (request, num_new), end in zip(scheduled, seq_lens, strict=True)
    ]
    lens = np.array([num_new for _, num_new in scheduled])
    last_rows = lens.cumsum() - 1
    owner = np.arange(len(lens)).repeat(lens)
    positions = np.arange(len(owner)) + (np.array(seq_lens) - 1 - last_rows)[owner]
    pages, inside = positions // page_size, positions % page_size
    slots = [
        numbers[np.array(rows)[owner], pages].astype(np.int64) * page_size + inside
        for numbers, rows in tables
    ]
    return _Rows(np.concatenate(spans), positions, last_rows.tolist(), slots)


def _lay_decodes_out(
    scheduled: list[Scheduled],
    seq_lens: list[int],
    tables: list[TableRows],
    page_size: int,
) -> _Rows:
    """Lay out decodes in plain Python, which is faster than numpy for a few numbers.

    On a CPU nothing is computed meanwhile, and after a step the code of every numpy function would
    have to be read from memory again.
    """
    ends = [length - 1 for length in seq_lens]
    tokens = [request.token(end) for (request, _), end in zip(scheduled, ends, strict=True)]
    slots = [
        np.array(
            [
                numbers.item(row, end // page_size) * page_size + end % page_size
                for row, end in zip(rows, ends, strict=True)
            ]
        )
        for numbers, rows in tables
    ]
    return _Rows(np.array(tokens), np.array(ends), list(range(len(ends))), slots)


def build_batch(
    scheduled: list[Scheduled],
    page_size: int,
    device: torch.device,
    slot_dtype: torch.dtype,
    sampled: torch.Tensor | None = None,
    *,
    only_windows: bool = False,
    kept: KeptTables | None = None,
) -> Batch:
    """Lay out the scheduled tokens, one request after another.

    `sampled` [N] int64 holds the tokens that the step in flight samples. Placeholders are replaced
    from it on the device. `only_windows` is the attribute of `KVPool`. `kept` are the page tables
    that stay on the device; None: they are laid out anew.
    """
    query_lens = [num_new for _, num_new in scheduled]
    assert min(query_lens) > 0
    seq_lens = [request.num_computed + num_new for request, num_new in scheduled]
    reach_end, ending, pending = _ends(scheduled, seq_lens)
    samplers = [sampler for row in ending for sampler in with_proposals(scheduled[row].request)]
    own = numpy_dtype(slot_dtype)
    if kept is None:
        tables = new_tables(scheduled, slot_dtype, only_windows=only_windows)
    else:
        tables = kept.step(scheduled)
    hosts = [table.host for table in tables]
    num_tokens = sum(query_lens)
    lay_out = _lay_decodes_out if num_tokens == len(scheduled) else _lay_out
    input_ids, positions, last_rows, slots = lay_out(scheduled, seq_lens, hosts, page_size)
    arrays: list[npt.NDArray[Any]] = [input_ids, positions]
    arrays.append(_sampled_rows(scheduled, ending, last_rows))
    table_arrays = [table.arrays() for table in tables]
    for of_table, own_slots in zip(table_arrays, slots, strict=True):
        arrays += [*of_table, own_slots.astype(own, copy=False)]
    states = []
    if scheduled[0].request.state is not None:
        states = [(request, request.state.number) for request, _ in scheduled if request.state]
        arrays.append(np.array([slot for _, slot in states]))
    adapters = _adapter_slots(scheduled)
    if adapters is not None:
        arrays.append(adapters)
    turns = turns_of(scheduled, positions)
    if turns is not None:
        arrays.append(turns)
    if pending:
        rows = [scheduled[row].request.sampled_row for row in pending]
        arrays += [np.array([last_rows[row] for row in pending]), np.array(rows)]
    tensors = iter(to_device(arrays, device))
    ids, places, sample_rows = next(tensors), next(tensors), next(tensors)
    of_layers = [
        (table.on_device(list(islice(tensors, len(of_table)))), next(tensors))
        for table, of_table in zip(tables, table_arrays, strict=True)
    ]
    state_slots = next(tensors) if states else None
    adapter_slots = next(tensors) if adapters is not None else None
    turned = places if turns is None else next(tensors)
    if pending:
        assert sampled is not None
        ids.index_copy_(0, next(tensors), sampled.index_select(0, next(tensors)))
    return Batch(
        scheduled=scheduled,
        input_ids=ids,
        positions=places,
        turns=turned,
        metadata=_metadata(query_lens, seq_lens, of_layers, state_slots),
        samplers=samplers,
        sample_rows=sample_rows,
        asks_no_more=_asks_no_more(samplers, scheduled),
        reach_end=reach_end,
        state_copies=list(_state_copies(states)),
        snapshots=[(slot, request.snapshot.number) for request, slot in states if request.snapshot],
        num_tokens=num_tokens,
        adapter_slots=adapter_slots,
    )


def _ends(
    scheduled: list[Scheduled], seq_lens: list[int]
) -> tuple[list[bool], list[int], list[int]]:
    """Return `Batch.reach_end`, the rows of `samplers`, and those that begin with a placeholder."""
    reach_end, ending, pending = [], [], []
    for row, ((request, _), seq_len) in enumerate(zip(scheduled, seq_lens, strict=True)):
        reach_end.append(seq_len >= request.num_tokens)
        if reach_end[row] and request.params.max_new_tokens > 0:
            ending.append(row)
        if request.num_placeholders:
            pending.append(row)
    return reach_end, ending, pending


def _asks_no_more(samplers: list[Sampler], scheduled: list[Scheduled]) -> bool:
    """Return `Batch.asks_no_more`."""
    asks = any(request.processors or request.params.logprobs is not None for request in samplers)
    due = any(request.prompt_logprobs_due for request, _ in scheduled)
    return bool(samplers) and not asks and not due


def _metadata(
    query_lens: list[int],
    seq_lens: list[int],
    of_layers: list[tuple[torch.Tensor, torch.Tensor]],
    state_slots: torch.Tensor | None,
) -> AttentionMetadata:
    """`of_layers` are pairs of page table and slots, those of windowed layers last."""
    metadata = None
    for block_table, slot_mapping in reversed(of_layers):
        metadata = AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            state_slots=state_slots,
            window=metadata,
        )
    assert metadata is not None
    return metadata


def _state_copies(states: list[tuple[Request, int]]) -> Iterator[tuple[int, int]]:
    """Yield `Batch.state_copies` of requests and their slots."""
    for request, slot in states:
        source = request.state_source
        if source is not None:
            yield source, slot
        if request.proposals and request.before is not None:
            yield slot if source is None else source, request.before.number


def _adapter_slots(scheduled: list[Scheduled]) -> npt.NDArray[np.int32] | None:
    """Return `Batch.adapter_slots`."""
    slots = [request.adapter_slot for request, _ in scheduled]
    if max(slots) < 0:
        return None
    return np.repeat(np.array(slots, np.int32), [num_new for _, num_new in scheduled])


def _sampled_rows(
    scheduled: list[Scheduled], ending: list[int], last_rows: list[int]
) -> npt.NDArray[np.int64]:
    """Return the rows of the `samplers`, given the last row of each request."""
    counts = [(last_rows[row], len(scheduled[row].request.proposals)) for row in ending]
    rows = [last - before for last, count in counts for before in range(count, -1, -1)]
    return np.array(rows, np.int64)


class Layout:
    """Lays out the steps of a model by `build_batch`.

    If the tensors are in host memory and the next step decodes the same requests, the last batch is
    reused: only tokens, positions and slots are written. Between two steps of a CPU everything that
    is touched comes from memory, so touching less is faster. On other devices the page tables stay,
    and only their changes are sent.
    """

    def __init__(
        self,
        page_size: int,
        device: torch.device,
        slot_dtype: torch.dtype,
        *,
        only_windows: bool = False,
        images: Callable[[list[Scheduled]], StepImages | None] | None = None,
    ) -> None:
        """`images` returns the rows of images of a step, for a model that takes images."""
        self._images = images
        self._form = (page_size, device, slot_dtype)
        self._only_windows = only_windows
        self._decodes: _Decodes | None = None
        self._kept: KeptTables | None = None
        if device.type != "cpu":
            self._kept = KeptTables(slot_dtype, device, only_windows=only_windows)

    def batch(self, scheduled: list[Scheduled], sampled: torch.Tensor | None = None) -> Batch:
        """Return the batch of a step, valid until the next call. `sampled`: see `build_batch`."""
        if self._decodes is not None and self._decodes.go_on(scheduled):
            return self._decodes.batch
        try:
            batch = build_batch(
                scheduled, *self._form, sampled, only_windows=self._only_windows, kept=self._kept
            )
            if self._images is not None:
                batch.images = self._images(scheduled)
        except BaseException:
            self.forget()
            raise
        stays = is_at_hand(batch.input_ids) and batch.is_decode and _go_on_alike(batch)
        self._decodes = _Decodes(batch, self._form[0]) if stays else None
        return batch

    def forget(self) -> None:
        """Drop what is kept of the last step."""
        self._decodes = None
        if self._kept is not None:
            self._kept.forget()


def _go_on_alike(batch: Batch) -> bool:
    """Whether one more token of each request changes only tokens, positions and slots.

    That is not so for prompts (they may get pages of the prefix cache), windows (they free pages),
    recurrent states (they have slots) and requests that do not reach their end (they get no token).
    """
    return all(batch.reach_end) and not any(
        request.num_computed < request.num_prompt
        or request.num_placeholders
        or request.window
        or request.state is not None
        for request, _ in batch.scheduled
    )


class _Decodes:
    """A batch of decodes, and the memory of those of its tensors that change."""

    def __init__(self, batch: Batch, page_size: int) -> None:
        self.batch = batch
        self._page_size = page_size
        self._requests = [request for request, _ in batch.scheduled]
        self._pages = [request.pages for request in self._requests]
        self._seq_lens = batch.metadata.seq_lens
        self._table = batch.metadata.block_table.numpy()
        # `turns` may be `positions`.
        changing = batch.input_ids, batch.positions, batch.turns, batch.metadata.slot_mapping
        self._ids, self._positions, self._turns, self._slots = (
            tensor.numpy().data for tensor in changing
        )

    def go_on(self, scheduled: list[Scheduled]) -> bool:
        """Advance the batch by a token each. Return False if the next step is not that."""
        if len(scheduled) != len(self._requests):
            return False
        page_size, width = self._page_size, self._table.shape[1]
        for row, (request, num_new) in enumerate(scheduled):
            position, pages = self._seq_lens[row], self._pages[row]
            if (
                request is not self._requests[row]
                or num_new != 1
                or request.num_computed != position
                or request.num_tokens != position + 1
                or request.num_placeholders
                # A preempted request has another list: `KVCache` makes a new one.
                or request.pages is not pages
            ):
                return False
            place, inside = divmod(position, page_size)
            if not inside:
                if place == width:
                    return False
                self._table[row, place] = pages[place]
            self._slots[row] = pages[place] * page_size + inside
            self._ids[row] = request.token(position)
            self._positions[row] = position
            self._turns[row] = position + request.turn_shift
            self._seq_lens[row] = position + 1
        return True

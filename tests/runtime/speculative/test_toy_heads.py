"""Drafts of a head change no answer, keep no memory, and may fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse import sparse
from toy_runner import VOCAB, ToyRunner, WindowedToyRunner, assert_idle, drain, make_core, tokens

from piecework.kernels.attention import AttentionMetadata
from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import GenerateRequest, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.speculative.head import HeadDrafter
from piecework.runtime.speculative.speculation import Speculation


class ToyHead:
    """Knows how `ToyRunner` makes the hidden state of a token from that of the token before it.

    It is its own attention, and looks at the slots that a step would write.
    """

    first_column = 0

    def __init__(self, page_size: int) -> None:
        self.pool = SimpleNamespace(page_size=page_size)
        self.calls = 0

    @contextmanager
    def step(self, metadata: AttentionMetadata) -> Iterator[None]:
        self.metadata = metadata
        yield

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        slots, size = self.metadata.slot_mapping.numpy(), self.pool.page_size
        assert (slots >= size).all(), "a draft is written to the reserved page"
        assert len(set(slots)) == len(slots), "two rows share a slot"
        row = 0
        for index, (new, end) in enumerate(
            zip(self.metadata.query_lens, self.metadata.seq_lens, strict=True)
        ):
            place = positions[row : row + new].numpy()
            assert place.tolist() == list(range(end - new, end))
            table = self.metadata.block_table[index].numpy()
            assert (table[place // size] * size + place % size == slots[row : row + new]).all()
            row += new
        return (hidden * 31 + input_ids[:, None] + 1) % 1_000_003

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(state), VOCAB)
        return logits.scatter_(1, state % VOCAB, 5.0)


class WrongHead(ToyHead):
    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(state + (state % 3 == 0).long())


class FailingHead(ToyHead):
    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.calls > 6:
            raise RuntimeError("the device of drafts is gone")
        return hidden


class Watched(ToyRunner):
    """Shows the hidden states of each step to a drafter."""

    listener: HeadDrafter

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        self.listener.observe(batch.scheduled, hidden)
        return hidden


class WatchedWindows(Watched, WindowedToyRunner):
    pass


@pytest.mark.parametrize(
    ("kind", "pages", "overlap", "is_windowed"),
    # Each pair of values in the default run.
    sparse(
        product((ToyHead, WrongHead, FailingHead), (26, 90), (False, True), (False, True)),
        kept=[
            *((ToyHead, 26, True, True), (ToyHead, 90, False, False)),
            *((WrongHead, 26, False, True), (WrongHead, 90, True, False)),
            *((FailingHead, 26, True, False), (FailingHead, 90, False, True)),
        ],
    ),
)
def test_drafts_change_no_answer(
    kind: type[ToyHead], pages: int, overlap: bool, is_windowed: bool
) -> None:
    sizes: dict[str, Any] = {"num_pages": pages, "overlap": overlap}
    if is_windowed:
        sizes["window_pages"] = pages
    preemptions = 0
    for seed in range(4):
        sizes |= {"share_prefixes": seed != 1, "token_budget": [32, 7, 90, 20][seed]}
        watched = WatchedWindows if is_windowed else Watched
        core, drafter = _core(kind(4), 1 + 2 * seed, watched, sizes)
        found = _answers(core, seed)
        plain = WindowedToyRunner if is_windowed else ToyRunner
        expected = _answers(make_core(runner_class=plain, **sizes)[0], seed)
        assert {rid: tokens(each) for rid, each in found.items()} == {
            rid: tokens(each) for rid, each in expected.items()
        }
        assert not drafter._followed
        stats = core.stats()
        preemptions += stats.preemptions_total
        assert stats.draft_tokens_total > 0
        if kind is ToyHead:
            assert stats.accepted_tokens_total == stats.draft_tokens_total
    assert (preemptions > 0) == (pages == 26)


def _core(
    head: Any, steps: int, runner: type[Watched], sizes: dict[str, Any]
) -> tuple[EngineCore, HeadDrafter]:
    drafter = HeadDrafter(
        head,
        head,
        device=torch.device("cpu"),
        slot_dtype=torch.int64,
        steps=steps,
        reserve=lambda request, count: core.cache.reserve(request, count),
    )
    speculation = Speculation([], most=8, max_rows=64, drafter=drafter)
    core, watched = make_core(runner_class=runner, speculation=speculation, **sizes)
    watched.listener = drafter  # type: ignore[attr-defined]
    return core, drafter


def _answers(core: EngineCore, seed: int) -> dict[str, list[TokenOutput]]:
    choose = random.Random(seed)
    for number in range(7):
        core.add(
            GenerateRequest(
                rid=str(number),
                input_ids=[number % 2] * 9 + [choose.randrange(9) for _ in range(number * 5)],
                params=SamplingParams(
                    max_new_tokens=20 + number,
                    temperature=[0.0, 1.0, 2.0][number % 3],
                    seed=number,
                    ignore_eos=True,
                    stop_token_ids=[choose.randrange(VOCAB)],
                ),
            )
        )
    outputs = drain(core)
    assert_idle(core)
    return outputs

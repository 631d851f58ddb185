"""A draft model changes no answer, keeps no page, and may fail."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from toy_runner import ToyRunner, assert_idle, drain, make_core, tokens

from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import GenerateRequest, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.speculative.draft_model import DraftModel
from piecework.runtime.speculative.speculation import Speculation


class WrongRunner(ToyRunner):
    """Agrees with `ToyRunner` on most tokens."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        wrong = (hidden % 5 == 0).long()
        return super().compute_logits(hidden + wrong)


class FailingRunner(ToyRunner):
    def forward(self, batch: Batch) -> torch.Tensor:
        if len(self.step_tokens) > 6:
            raise RuntimeError("the device of drafts is gone")
        return super().forward(batch)


@pytest.mark.parametrize("drafts", [ToyRunner, WrongRunner, FailingRunner])
@pytest.mark.parametrize("pages", [12, 60], ids=["few pages of drafts", "enough"])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_answer(drafts: type[ToyRunner], pages: int, overlap: bool) -> None:
    plain, _ = _answers(None, overlap)
    for seed in range(3):
        drafter = DraftModel(
            drafts(pages, 4),
            make_cache(pages, 4, share_prefixes=seed != 1),
            steps=1 + 2 * seed,
            vocab_size=101,
        )
        speculation = Speculation([], most=8, max_rows=64, drafter=drafter)
        found, core = _answers(speculation, overlap)
        assert {rid: tokens(each) for rid, each in found.items()} == {
            rid: tokens(each) for rid, each in plain.items()
        }
        assert not drafter._twins
        drafter.check()
        stats = core.stats()
        if drafts is ToyRunner and pages == 60:
            greedy = stats.accepted_tokens_total / stats.draft_tokens_total
            assert greedy == 1.0, "the same model with the same noise drafts the same tokens"
            assert stats.steps_total < 60
        else:
            assert stats.draft_tokens_total > 0


def _answers(
    speculation: Speculation | None, overlap: bool
) -> tuple[dict[str, list[TokenOutput]], Any]:
    core, _ = make_core(speculation=speculation, overlap=overlap)
    choose = random.Random(1)
    for number in range(6):
        core.add(
            GenerateRequest(
                rid=str(number),
                input_ids=[choose.randrange(9) for _ in range(choose.randrange(1, 40))],
                params=SamplingParams(
                    max_new_tokens=20 + number,
                    temperature=[0.0, 1.0, 2.0][number % 3],
                    seed=number,
                    ignore_eos=True,
                ),
            )
        )
    outputs = drain(core)
    assert_idle(core)
    return outputs, core

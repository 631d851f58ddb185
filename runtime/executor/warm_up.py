"""Runs dummy batches of every kind, so that kernels are compiled and chosen before the first
request.
"""

from __future__ import annotations

import numpy as np
import torch

from ...kernels import ops
from ...kernels.platform.device import Device
from ...kernels.staging import to_device
from ..core.forward_context import PagedAttention
from ..graphs.dummy_batch import dummy_batch
from ..models.causal_lm import CausalLM

_PROMPT_LENGTHS = (256, 48, 8)  # Tokens that fill large, medium and small tiles.
_MANY_DECODES = 256  # So many fill the device. A single decode is split over it.


@torch.inference_mode()
def warm_up(model: CausalLM, attention: PagedAttention, platform: Device, *, longest: int) -> None:
    """Run prefills and decodes, few and many, up to `longest` tokens of context.

    They store keys and values in the reserved page only.
    """
    prompts = [[min(length, longest)] for length in _PROMPT_LENGTHS]
    for query_lens, seq_lens in (
        *zip(prompts, prompts, strict=True),
        ([1], [longest]),
        ([1] * _MANY_DECODES, [1] * _MANY_DECODES),
    ):
        hidden = run_dummy_batch(model, attention, platform, query_lens, seq_lens)
        logits = model.compute_logits(hidden[:1])
        logits.argmax(-1)
    sample(logits)
    platform.synchronize()


def sample(logits: torch.Tensor) -> None:
    """Draw a token from each row of logits [N, V] float32, with every filter."""
    rows = len(logits)
    top_k, top_p, min_p = (
        torch.full((rows,), value, device=logits.device) for value in (2, 0.5, 0.1)
    )
    (uniform,) = to_device([np.zeros(rows, ops.uniform_dtype(logits.device.type))], logits.device)
    ops.sample_filtered(logits.softmax(-1), top_k, top_p, min_p, uniform)


def run_dummy_batch(
    model: CausalLM,
    attention: PagedAttention,
    platform: Device,
    query_lens: list[int],
    seq_lens: list[int],
) -> torch.Tensor:
    """Return the hidden states [T, hidden] of a dummy batch."""
    batch = dummy_batch(query_lens, seq_lens, platform, attention.pool.page_size)
    with attention.step(batch.metadata):
        hidden: torch.Tensor = model(batch.input_ids, batch.positions)
    return hidden

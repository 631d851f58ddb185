"""A model's answers by one process, and by ranks that are threads of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from piecework.kernels.attention import AttentionBackend, AttentionMetadata
from piecework.kernels.chunked_attention import with_chunks
from piecework.kernels.collectives import TENSOR_PARALLEL, get_group
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.platform.platform import Platform
from piecework.runtime.cache.pool import KVPool, in_cache_dtype
from piecework.runtime.cache.states import StatePool
from piecework.runtime.core.forward_context import PagedAttention
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.loader.loader import load_model
from piecework.runtime.loader.parallel import WHOLE, Shard
from piecework.runtime.models.llama import LlamaForCausalLM
from tests.thread_ranks import on_ranks, thread_ranks

PROMPT = [(31 + 7 * j * j) % 500 for j in range(37)]
_PAGE = 128
_DTYPE = torch.float32
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Said(NamedTuple):
    """Log-probabilities [tokens, vocab] of all tokens that were computed, and the greedy tokens."""

    logprobs: torch.Tensor
    tokens: list[int]


def load(
    path: Any, shard: Shard = WHOLE, *, device: str = "cpu", **settings: Any
) -> LlamaForCausalLM:
    """In float32, without kernels of the CPU."""
    return load_model(str(path), _DTYPE, torch.device(device), False, shard=shard, **settings)


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM,
    size: int = 1,
    *,
    steps: int = 4,
    forward: Forward | None = None,
    cache: str = "auto",
    platform: Platform | None = None,
    backend: AttentionBackend | None = None,
) -> Said:
    """Of `PROMPT` and `steps` greedy tokens behind it, all in one page or
    chunks of attention, by a rank of `size`."""
    platform = platform or CpuPlatform()
    register_attention(platform.dispatch_key)
    device = platform.device()
    layouts = in_cache_dtype(model.kv_layouts(_DTYPE), cache, model.kv_scales)
    backend = with_chunks(backend or TorchAttention(), layouts)
    page = min([_PAGE, *(each.window for each in layouts if each.chunked and each.window)])
    pages = torch.arange(1, 1 + _PAGE // page, dtype=platform.slot_dtype, device=device)
    pool = KVPool(layouts, num_pages=1 + len(pages), page_size=page, platform=platform)
    states = StatePool(model.state_layouts(_DTYPE), num_slots=2, platform=platform)
    attention = PagedAttention(backend=backend, pool=pool, states=states)
    rows, tokens = [], list(PROMPT)
    for step in range(steps + 1):
        begin = 0 if step == 0 else len(tokens) - 1
        positions = torch.arange(begin, len(tokens))
        metadata = AttentionMetadata(
            query_lens=[len(positions)],
            seq_lens=[len(tokens)],
            block_table=pages[None],
            slot_mapping=(positions + page).to(device, platform.slot_dtype),
            state_slots=torch.ones(1, dtype=torch.int64, device=device),
        )
        with attention.step(metadata):
            hidden = (forward or model)(
                torch.tensor(tokens[begin:], device=device), positions.to(device)
            )
        logits = model.compute_logits(hidden)
        if size > 1:
            parts = get_group(TENSOR_PARALLEL).all_gather(logits)
            logits = torch.cat(parts.chunk(size), dim=1)
        rows.append(logits.cpu()[:, : model.config.vocab_size].log_softmax(-1))
        tokens.append(int(rows[-1][-1].argmax()))
    return Said(torch.cat(rows), tokens[len(PROMPT) :])


def answer_by(
    size: int,
    load_part: Callable[[Shard], LlamaForCausalLM],
    *,
    cuts_groups: bool = False,
    ep_size: int = 1,
    **settings: Any,
) -> Said:
    """What `size` ranks say, whose models `load_part` gives, one after another."""
    models = [load_part(Shard(rank, size, cuts_groups, ep_size)) for rank in range(size)]
    with thread_ranks(size) as ranks:
        said = on_ranks(ranks, lambda rank: answer(models[rank], size, **settings))
    assert all(torch.equal(each.logprobs, said[0].logprobs) for each in said)
    return said[0]


def assert_alike(one: Said, other: Said, within: float = 1e-4) -> None:
    assert one.tokens == other.tokens
    assert (one.logprobs - other.logprobs).abs().max() < within

"""Decodes of ranks in one native call give what one process gives, and what the ranks give op by
op.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_variants import built, mostly_best
from shared_ranks import at_once, shared_groups
from tiny_models import make_tiny_model

from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.collectives import TENSOR_PARALLEL, CollectiveError, get_group, set_group
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.native.step import NativeStep, make_native_step
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.runtime.cache.pool import KVPool
from piecework.runtime.core.forward_context import PagedAttention
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.llm import LLM
from piecework.runtime.loader.loader import load_model
from piecework.runtime.loader.parallel import Shard
from tests.thread_ranks import on_ranks, thread_ranks

PAGE, PAGES = 16, 80
SHAPES: list[dict[str, Any]] = [
    {"size": 2, "architecture": "qwen2", "tie_word_embeddings": True},
    {"size": 2, "architecture": "qwen3", "quantization": "int8"},
    {"size": 3, "architecture": "llama", "num_attention_heads": 6, "num_key_value_heads": 3},
    {"size": 2, "architecture": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 3},
]


class Rank:
    """A rank's model, and a cache whose keys and values are zeros."""

    def __init__(self, path: Path, shard: Shard, quantization: str) -> None:
        self.model = load_model(
            str(path),
            torch.bfloat16,
            torch.device("cpu"),
            progress=False,
            kernels=native_linear(),
            quantization=quantization,
            shard=shard,
        )
        self.layouts = self.model.kv_layouts(torch.bfloat16)

    def pool(self) -> KVPool:
        return KVPool(self.layouts, num_pages=PAGES, page_size=PAGE, platform=CpuPlatform())

    def native(self, group: Any, library: Any = None) -> NativeStep:
        pool = self.pool()
        return NativeStep(
            library or build.load_kernels(), self.model, pool.layouts, pool.k, pool.v, group
        )


def step(model: Any, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Ids, positions and the rest of a step of requests that have so many tokens, all new."""
    generator = torch.Generator().manual_seed(len(lens))
    width = -(-max(lens) // PAGE)
    table = torch.arange(1, 1 + len(lens) * width).view(len(lens), width)
    slots = torch.cat([row[0] * PAGE + torch.arange(n) for row, n in zip(table, lens, strict=True)])
    metadata = AttentionMetadata(
        query_lens=lens, seq_lens=lens, block_table=table, slot_mapping=slots
    )
    ids = torch.randint(model.config.vocab_size, (sum(lens),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lens]), metadata


def logits_of(model: Any, group: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Of the whole vocabulary."""
    logits: torch.Tensor = model.compute_logits(hidden)
    if group is not None:
        logits = torch.cat(group.all_gather(logits).chunk(group.size), dim=1)
    return logits[:, : model.config.vocab_size].log_softmax(-1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_they_are_the_forward_op_by_op_and_one_processs(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    shape = dict(shape)
    size, quantization = shape.pop("size"), shape.pop("quantization", "none")
    path = make_tiny_model(tmp_path, hidden_size=96, intermediate_size=192, **shape)
    ranks = [Rank(path, Shard(rank, size, True), quantization) for rank in range(size)]
    whole = Rank(path, Shard(), quantization)
    register_attention("CPU")
    groups = shared_groups(size)
    for lens in ([1], [1] * 20, [5, 1, 9]):
        given = step(whole.model, lens)

        def eager(rank: int, given: Any = given) -> torch.Tensor:
            model, pool = ranks[rank].model, ranks[rank].pool()
            attention = PagedAttention(backend=TorchAttention(), pool=pool)
            with torch.inference_mode(), attention.step(given[2]):
                return logits_of(model, get_group(TENSOR_PARALLEL), model(*given[:2]))

        def native(rank: int, given: Any = given) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = ranks[rank].native(groups[rank]).call(*given).hidden()
            return hidden, logits_of(ranks[rank].model, groups[rank], hidden)

        with thread_ranks(size) as threads:
            by_op = on_ranks(threads, eager)[0]
        alone = logits_of(whole.model, None, whole.native(None).call(*given).hidden())
        found = at_once(size, native)
        assert all(torch.equal(hidden, found[0][0]) for hidden, _ in found)
        loss = 0.03 if quantization == "none" else 0.15
        assert (found[0][1] - by_op).abs().mean() < loss
        assert (found[0][1] - alone).abs().mean() < loss


@pytest.mark.parametrize("variant", mostly_best())
def test_threads_of_ranks_stay_together(tmp_path: Path, variant: build.Variant) -> None:
    path = make_tiny_model(tmp_path, architecture="qwen3", intermediate_size=192)
    ranks = [Rank(path, Shard(rank, 2), "none") for rank in range(2)]
    given = step(ranks[0].model, [1] * 30)
    library = built(variant)
    groups = shared_groups(2, library=library)

    def run(rank: int) -> list[torch.Tensor]:
        native, found = ranks[rank].native(groups[rank], library), []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)  # this thread's alone
            found.append(native.call(*given).hidden())
        return found

    first, second = at_once(2, run)
    assert all(torch.equal(first[0], other) for other in (*first, *second))


def test_a_rank_that_is_in_something_else_ends_the_step(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, intermediate_size=192)
    ranks = [Rank(path, Shard(rank, 2), "none") for rank in range(2)]
    groups = shared_groups(2, seconds=5)

    def run(rank: int) -> None:
        torch.set_num_threads(2)
        native = ranks[rank].native(groups[rank])
        with pytest.raises(CollectiveError, match=r"decode step no\. 1 of .* decode step no\. 1"):
            native.call(*step(ranks[rank].model, [1] * (3 + rank))).hidden()

    at_once(2, run)


def test_ranks_without_shared_memory_go_op_by_op(tmp_path: Path) -> None:
    rank = Rank(make_tiny_model(tmp_path, intermediate_size=192), Shard(0, 2), "none")
    pool, group = rank.pool(), shared_groups(2)[0]
    for given, expected in ((group, NativeStep), (object(), type(None))):
        set_group(TENSOR_PARALLEL, given)
        try:
            assert type(make_native_step(rank.model, pool.layouts, pool.k, pool.v)) is expected
        finally:
            set_group(TENSOR_PARALLEL, None)


@pytest.mark.slow
@pytest.mark.skipif(
    not build.runnable_variants()[0].needs, reason="decodes run op by op on this CPU"
)
def test_an_engine_of_ranks_decodes_so(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, architecture="qwen3", intermediate_size=192)
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_total_tokens": 1024,
        "context_length": 128,
        "num_threads": 1,
    }
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=1)
    prompts = [[5, 6, 7 + i] for i in range(3)]
    alone = LLM(str(path), **settings).generate(prompts, params)
    llm = LLM(str(path), tp_size=2, **settings)
    ranks = llm.generate(prompts, params)
    assert llm.info.graphs.decode_backend == "native" and "collectives" not in llm.info.remarks
    for one, other in zip(ranks, alone, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.1)

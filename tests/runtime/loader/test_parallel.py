"""Ranks that hold parts of a model say what one process says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from torch import nn

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import PieceStore, weight_bytes
from piecework.compilation.piecewise import PiecewiseForward
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.graphs.compile_pieces import make_pieces
from piecework.runtime.graphs.pieces import stored_key
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.layers.norm import RMSNorm
from piecework.runtime.layers.rotary import Rotary
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.parallel import Shard
from tests.runtime.models.sizes import (
    DELTA,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GEMMA4_LARGE,
    INDEXED,
    LATENT,
    MAMBA,
    SHORT_CONV,
)
from tests.runtime.models.variants import OTHERS
from tests.split_models import answer, answer_by, assert_alike, load
from tests.thread_ranks import on_ranks, thread_ranks

CPU = torch.device("cpu")

SMALL_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "shared key/value heads": ("llama", 4, {}),
    "tied": ("llama", 2, {"tie_word_embeddings": True}),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", 2, {}),
    "qwen2 on 4, one head shared by all": (
        "qwen2",
        4,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", 2, {}),
    "a window": ("mistral", 2, {"sliding_window": 8}),
    "heads that do not go round": (
        "qwen3",
        2,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "an MLP that does not go round": ("llama", 4, {"intermediate_size": 102, "mlp_bias": True}),
    "gemma3": ("gemma3_text", 2, {"head_dim": 32, "tie_word_embeddings": True}),
    "layers that share keys and values": ("gemma3n_text", 2, GEMMA3N),
    "layers whose heads have two sizes": ("gemma4_text", 2, GEMMA4),
    "keys that are values": ("gemma4_text", 2, GEMMA4_LARGE),
    "phi3, fused in the checkpoint": ("phi3", 2, {"partial_rotary_factor": 0.5}),
    "a norm over all heads": ("olmo2", 2, {}),
    "a norm over all heads, keys shared": ("olmo2", 4, {}),
    "norms of each head": ("cohere", 2, {"use_qk_norm": True, "tie_word_embeddings": True}),
    "heads stored by groups": (OTHERS["falcon-40b"][0], 2, OTHERS["falcon-40b"][1]),
    "learned positions": (OTHERS["gpt-neo"][0], 2, OTHERS["gpt-neo"][1]),
    "slopes of heads": (OTHERS["bloom"][0], 2, OTHERS["bloom"][1]),
    "slopes of heads that do not go round": (
        "mpt",
        2,
        {"hidden_size": 80, "num_attention_heads": 5},
    ),
    "a vocabulary that does not go round": ("llama", 2, {"vocab_size": 500, "eos_token_id": None}),
    "short convolutions": ("lfm2", 2, SHORT_CONV),
    "lightning attention": (OTHERS["minimax"][0], 2, OTHERS["minimax"][1]),
    "Kimi Delta Attention beside latent attention": (
        OTHERS["kimi-linear"][0],
        2,
        OTHERS["kimi-linear"][1],
    ),
    "attention beside Mamba 2": ("falcon_h1", 2, FALCON),
    "feed-forward without a gate": (OTHERS["nemotron-h"][0], 2, OTHERS["nemotron-h"][1]),
    "experts without gates": (OTHERS["nemotron-3"][0], 2, OTHERS["nemotron-3"][1]),
    "heads of Mamba, which ranks have whole": (OTHERS["zamba"][0], 2, OTHERS["zamba"][1]),
    "blocks that layers share": (OTHERS["zamba2"][0], 2, OTHERS["zamba2"][1]),
    "channels of Mamba beside experts": (OTHERS["jamba"][0], 2, OTHERS["jamba"][1]),
    "Mamba 2 alone": ("mamba2", 2, {"num_heads": 4, "head_dim": 32, "n_groups": 2}),
    "gates beside queries": ("qwen3_5_text", 2, DELTA),
    "keys beside their values": ("qwen3_next", 2, {**DELTA, "num_experts": 2, **SMALL_EXPERTS}),
    "a group of Mamba 2 that ranks share": (
        "granitemoehybrid",
        2,
        {**MAMBA, "mamba_n_groups": 1, "num_local_experts": 0, "mamba_proj_bias": True},
    ),
    "layers with a state that do not go round": (
        "qwen3_5_text",
        2,
        {**DELTA, "linear_num_key_heads": 1},
    ),
}


REPEATED = ("llama", "tied", "qwen2", "qwen3", "gemma3", "a norm over all heads", "Mamba 2 alone")
"""Whose parts other cases have."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in REPEATED)) for case in CASES]
)
def test_ranks_say_what_one_process_says(case: str, tmp_path: Path) -> None:
    architecture, size, overrides = CASES[case]
    path = make_tiny_model(tmp_path, architecture, **overrides)
    assert_alike(answer_by(size, partial(load, path)), answer(load(path)))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (6, 3, 2), (12, 4, 3)])
def test_ranks_may_cut_the_groups_of_heads(
    heads: int, kv_heads: int, size: int, tmp_path: Path
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    path = make_tiny_model(tmp_path, "qwen3", **shape)
    (layer, *_) = load(path, Shard(1, size, True)).kv_layouts(torch.float32)
    assert (layer.num_heads, layer.num_kv_heads) == (-(-heads // size), 2)
    assert_alike(answer_by(size, partial(load, path), cuts_groups=True), answer(load(path)))


EXPERTS = {
    "num_experts": 4,
    **SMALL_EXPERTS,
}


@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_that_give_back_their_input_count_once(ep_size: int, tmp_path: Path) -> None:
    """And not on each rank."""
    architecture, overrides = OTHERS["longcat-flash"]
    path = make_tiny_model(tmp_path, architecture, **overrides)
    assert_alike(answer_by(2, partial(load, path), ep_size=ep_size), answer(load(path)))


@pytest.mark.parametrize(("size", "ep_size"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_that_have_some_experts_or_columns_say_what_one_process_says(
    size: int, ep_size: int, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, "qwen2_moe", num_key_value_heads=4, **EXPERTS)
    by_ranks = answer_by(size, partial(load, path), ep_size=ep_size)
    assert_alike(by_ranks, answer(load(path)))


@pytest.mark.parametrize(
    ("architecture", "sizes"), [("deepseek_v3", LATENT), ("glm_moe_dsa", INDEXED)]
)
def test_ranks_share_the_heads_of_latent_attention(
    architecture: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """And keep the same vectors of all tokens, and make the same choice of them."""
    path = make_tiny_model(tmp_path, architecture, **sizes)
    (part, *_) = load(path, Shard(1, 2)).kv_layouts(torch.float32)
    (whole, *_) = load(path).kv_layouts(torch.float32)
    assert part == replace(whole, num_heads=2) and part.token_bytes == whole.token_bytes
    assert_alike(answer_by(2, partial(load, path)), answer(load(path)))


@pytest.mark.parametrize(
    "case",
    ["short convolutions", "gates beside queries", "channels of Mamba beside experts"],
)
def test_a_rank_keeps_its_share_of_recurrent_states(case: str, tmp_path: Path) -> None:
    architecture, size, overrides = CASES[case]
    path = make_tiny_model(tmp_path, architecture, **overrides)
    whole, part = (
        sum(layout.num_bytes for layout in load(path, shard).state_layouts(torch.float32))
        for shard in (Shard(), Shard(1, size))
    )
    assert part == whole // size


def test_a_model_without_experts_has_no_groups_of_them(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="--ep-size is 2, but the model has no experts; leave"):
        load(path, Shard(0, 2, ep_size=2))


def test_pieces_are_the_same_for_all_ranks(tmp_path: Path) -> None:
    """Traced on no rank's weights, found in the cache by each, and right."""
    path = make_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    store: dict[str, Any] = {
        "platform": CpuPlatform(),
        "compiler": EagerCompiler(),
        "cache": CompileCache(tmp_path / "cache"),
        "max_tokens": 64,
    }
    register_attention("CPU")
    whole = load(path)
    hollow = hollow_model(whole.config, torch.float32, CPU, shard=Shard(0, 2))
    make_pieces(PieceMaker(**store), hollow, whole.config, torch.float32, ranks=2)
    key = stored_key(hollow, whole.config, torch.float32, {}, ranks=2)
    models = [load(path, Shard(rank, 2)) for rank in range(2)]
    forwards = [loaded(PieceStore(**store), model, key) for model in models]
    with thread_ranks(2) as ranks:
        said = on_ranks(ranks, lambda rank: answer(models[rank], 2, forward=forwards[rank]))
        assert ranks.calls.count("all_reduce") == (1 + 2 * 3) * 5
    for each in said:
        assert_alike(each, answer(whole))


def loaded(store: PieceStore, model: nn.Module, key: str) -> PiecewiseForward:
    """Raises where the cache lacks a piece."""
    work = store.load(model, key)
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value.forward


def test_each_of_two_ranks_holds_half_of_the_weights(tmp_path: Path) -> None:
    """But for norms and the tables of positions."""
    path = make_tiny_model(tmp_path, tie_word_embeddings=True, max_position_embeddings=64)
    whole, *parts = (load(path, shard) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    shared = sum(
        tensor.nbytes
        for module in whole.modules()
        if isinstance(module, RMSNorm | Rotary)
        for tensor in (*module.parameters(), *module.buffers())
    )
    first_id = 8
    for part in parts:
        assert weight_bytes(part) == (weight_bytes(whole) - shared) // 2 + shared + first_id


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "heads": (3, {}, r"layers\.0\.self_attn: 4 heads on 2 key/value heads .* 3 ranks; .*-size 2$"),
    "columns": (4, {"intermediate_size": 70}, r"\.0\.mlp: 70 columns .* 4 ranks; .*-size 2$"),
    "tokens": (4, {"vocab_size": 128}, r"embed_tokens: .* 128 tokens is too small .*-size 2$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_said_with_a_size_that_can(case: str, tmp_path: Path) -> None:
    size, overrides, message = REFUSED[case]
    path = make_tiny_model(tmp_path, **overrides)
    with pytest.raises(ValueError, match=message):
        load(path, Shard(0, size))


def test_a_rank_keeps_its_heads_keys_and_values(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    (first, *_) = load(path, Shard(1, 4)).kv_layouts(torch.float32)
    assert (first.num_heads, first.num_kv_heads) == (1, 1)

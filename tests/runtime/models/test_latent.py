"""What is particular to models of latent attention: one vector of a token, whatever keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantized_checkpoints import SIZES, edit_config, make_fp8, said
from tiny_models import make_tiny_model

from piecework.runtime.llm import LLM
from tests.runtime.models.variants import LATENT

WIDE = {
    **LATENT,
    **SIZES,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"), "deepseek_v3", **WIDE)


@pytest.fixture(scope="module")
def exact(folder: Path) -> list[list[float]]:
    return said(folder, attention_backend="torch")


def mean_difference(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = [
        abs(a - b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_a_cache_of_fewer_bits_says_about_the_same(
    folder: Path, exact: list[list[float]], backend: str, cache: str
) -> None:
    settings = {"attention_backend": backend, "kv_cache_dtype": cache, "chunked_prefill_size": 16}
    assert mean_difference(said(folder, dtype="bfloat16", **settings), exact) < 0.1


def test_a_cache_of_int8_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype int8: layers of latent attention"):
        LLM(str(folder), kv_cache_dtype="int8", max_total_tokens=256)


def test_blocks_of_float8_beside_routers_of_16_bits_are_served(
    exact: list[list[float]], tmp_path: Path
) -> None:
    quantised = make_fp8(tmp_path, block=True, architecture="deepseek_v3", **WIDE)
    widened = said(quantised, quantization="none")
    assert 0 < mean_difference(widened, exact) < 0.1
    assert 0 < mean_difference(said(quantised), widened) < 0.1


def test_kimi_k2_is_deepseek_v3_under_its_own_name(
    folder: Path, exact: list[list[float]], tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, model_type="kimi_k2")
    assert said(tmp_path, attention_backend="torch") == exact

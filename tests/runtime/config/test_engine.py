"""Engine settings: what cannot work is refused with a remedy, what is left open is chosen to fit
the machine.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.kernels.platform.step_defaults import StepDefaults
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.resolve import WindowPages, resolve_cache, resolve_steps
from piecework.runtime.config.resolved import ResolvedConfig

MIB = 2**20
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=512, hidden_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=96, norm_eps=1e-5,
    max_position_embeddings=4096, rope_theta=1e4,
)  # fmt: skip


def resolved(
    free: int = 1000 * MIB, page: int = MIB, slot: int = 0, **settings: Any
) -> ResolvedConfig:
    asked = EngineConfig(page_size=16, **settings)
    steps = resolve_steps(asked, MODEL, StepDefaults())
    return resolve_cache(
        steps, asked.max_total_tokens, free_bytes=free, page_bytes=page, slot_bytes=slot
    )


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"context_length": 0}, "--context-length"),
        ({"page_size": -1}, "--page-size"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static"),
        ({"dtype": "int3"}, "--dtype"),
        ({"device": "toaster"}, "--device"),
    ],
)
def test_a_senseless_setting_names_its_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"mem_fraction_static": 0.9}, r"raise --mem-fraction-static \(0\.9\)"),
        ({}, r"lower --chunked-prefill-size \(2048\) or --max-running-requests \(256\)"),
    ],
    ids=str,
)
def test_too_little_memory_says_how_much_there_is_and_what_to_do(
    settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(
        ValueError,
        match=r"too little memory .* 1 MiB are free, a page of 16 tokens takes 1\.00 MiB; "
        rf"{remedy}, or choose",
    ):
        resolved(free=MIB, **settings)


def test_a_cache_of_too_few_tokens_says_the_least() -> None:
    with pytest.raises(
        ValueError, match="--max-total-tokens 16 is too few: the least is 32, two pages"
    ):
        resolved(max_total_tokens=16)


def test_a_cache_larger_than_the_memory_says_what_fits() -> None:
    with pytest.raises(ValueError, match=r"--max-total-tokens 32000 .* at most 16000 tokens fit"):
        resolved(max_total_tokens=32_000)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="--context-length 5000 is more than the model's 4096"):
        resolved(context_length=5000)


def test_the_cache_takes_its_share_of_the_free_memory() -> None:
    assert resolved(mem_fraction_static=0.5).max_total_tokens == 500 * 16


def test_the_cache_is_no_larger_than_all_running_requests_can_use() -> None:
    assert resolved(free=10**6 * MIB, max_running_requests=2).max_total_tokens == 2 * 4096


def test_pages_that_take_no_memory_are_counted_too() -> None:
    """Those of a model whose layers all have windows."""
    steps = resolved(max_running_requests=10**9)
    own = WindowPages(64, 0)
    config = resolve_cache(steps, None, free_bytes=1000 * MIB, page_bytes=0, window=own)
    assert config.max_total_tokens == 2**26 * steps.page_size


def test_states_alone_may_take_all_memory_and_tokens_are_bounded() -> None:
    config = resolved(free=100 * MIB, page=0, slot=MIB, max_running_requests=200)
    assert (config.max_running_requests, config.state_slots) == (99, 100)
    assert config.max_total_tokens == 99 * 4096
    config = resolved(page=0, slot=1, max_running_requests=10**6)
    assert config.max_total_tokens == 2**22


def test_the_context_is_cut_to_what_the_cache_holds() -> None:
    config = resolved(max_total_tokens=1000)
    assert (config.max_total_tokens, config.context_length) == (992, 992)


@given(
    free=st.integers(2, 10**6),
    page=st.integers(1, 10**4),
    running=st.none() | st.integers(1, 512),
    context=st.none() | st.integers(1, 4096),
)
def test_whatever_is_left_open_the_cache_fits_and_every_number_is_chosen(
    free: int, page: int, running: int | None, context: int | None
) -> None:
    try:
        config = resolved(
            free=free, page=page, max_running_requests=running, context_length=context
        )
    except ValueError as error:
        assert "too little memory" in str(error)
        return
    numbers = (
        config.context_length,
        config.max_total_tokens,
        config.max_running_requests,
        config.chunked_prefill_size,
    )
    assert all(number >= 1 for number in numbers)
    assert config.max_total_tokens // 16 * page <= free
    assert config.context_length <= config.max_total_tokens


@pytest.mark.parametrize(
    ("slot", "asked", "running", "slots"),
    [(MIB, 16, 16, 33), (20 * MIB, 256, 24, 25), (20 * MIB, 14, 14, 25), (250 * MIB, 4, 1, 2)],
)
def test_states_take_half_of_the_memory_at_most_and_limit_what_runs(
    slot: int, asked: int, running: int, slots: int
) -> None:
    config = resolved(slot=slot, max_running_requests=asked)
    assert (config.max_running_requests, config.state_slots) == (running, slots)
    assert config.cuda_graph_max_bs <= running
    assert slots * slot + config.max_total_tokens // 16 * MIB <= 1000 * MIB


def test_states_of_prefixes_that_are_not_shared_take_no_memory() -> None:
    settings: dict[str, Any] = {"max_running_requests": 16, "disable_radix_cache": True}
    config = resolved(slot=MIB, **settings, speculative_algorithm="none")
    assert config.state_slots == 17
    # Speculation copies a state before it verifies guesses.
    assert resolved(slot=MIB, **settings).state_slots == 33


def test_no_memory_for_the_state_of_one_request() -> None:
    with pytest.raises(ValueError, match=r"500 of 1000 MiB .* 400\.00 MiB are the least; choose"):
        resolved(slot=400 * MIB)
    with pytest.raises(ValueError, match=r"50 of 1000 MiB .*; raise --mem-fraction-static"):
        resolved(slot=40 * MIB, mem_fraction_static=0.1)


@pytest.mark.parametrize("layers_beside", [0, MIB])
@given(
    window=st.integers(1, 2000),
    running=st.integers(1, 300),
    chunk=st.integers(1, 4096),
    free=st.integers(4, 20_000),
)
def test_windows_have_pages_for_one_request_and_a_chunk(
    layers_beside: int, window: int, running: int, chunk: int, free: int
) -> None:
    """Or as many as the other layers: then each page of those has one."""
    asked = EngineConfig(
        page_size=16, max_running_requests=running, chunked_prefill_size=chunk, context_length=4000
    )
    steps = resolve_steps(asked, MODEL, StepDefaults())
    own = WindowPages(window, MIB)
    config = resolve_cache(steps, None, free_bytes=free * MIB, page_bytes=layers_beside, window=own)
    pages, own_pages = config.max_total_tokens // 16, config.window_pages - 1
    assert pages * layers_beside + own_pages * MIB <= free * MIB
    least = -(-(window - 1 + chunk - 1) // 16) + 1
    assert own_pages == pages or least <= own_pages < pages

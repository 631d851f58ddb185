"""Prefixes that left the KV cache: found again in the tiers below, with the same texts."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.messages import FlushCache
from piecework.runtime.engine import loading
from piecework.runtime.tiers.block_copies import BlockCopies
from piecework.runtime.tiers.segments import Segments
from piecework.runtime.tiers.tiers import Tiers
from tests.runtime.models.variants import LLAMAS, OTHERS
from tests.runtime.text_engines import PARAMS, Engine, prompt_of

KINDS = ["llama", "mistral-window", "gemma3", "deepseek-v3", "lfm2"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def variant(name: str, folder: Path) -> Path:
    architecture, overrides = {**LLAMAS, **OTHERS}[name]
    return make_tiny_model(folder, architecture, **overrides)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_cache_is_found_after_a_restart(name: str, tmp_path: Path) -> None:
    model, prompt = variant(name, tmp_path / "model"), prompt_of(1)
    more = [*prompt, *prompt_of(2, 30)]
    first = Engine(model, tmp_path / "kv")
    expected, found = first.ask(prompt)
    longer, _ = Engine(model, None).ask(more)
    assert found == 0
    first.end()
    second = Engine(model, tmp_path / "kv")
    assert second.ask(prompt) == (expected, 112)
    tokens, found = second.ask(more)
    assert tokens == longer and found >= 112
    assert second.engine._loading.loaded_tokens >= 112


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_found_and_another_format_is_not(
    llama: Path, tmp_path: Path, kv_cache_dtype: str
) -> None:
    prompt = prompt_of(1)
    first = Engine(llama, tmp_path, kv_cache_dtype=kv_cache_dtype)
    expected, _ = first.ask(prompt)
    first.end()
    assert Engine(llama, tmp_path, kv_cache_dtype=kv_cache_dtype).ask(prompt) == (expected, 112)
    assert Engine(llama, tmp_path).ask(prompt)[1] == 0


def test_other_weights_page_sizes_and_clients_find_nothing(llama: Path, tmp_path: Path) -> None:
    prompt, folder = prompt_of(1), tmp_path / "kv"
    first = Engine(llama, folder)
    first.ask(prompt, tenant="one")
    first.end()
    assert Engine(llama, folder).ask(prompt, tenant="one")[1] == 112
    assert Engine(llama, folder).ask(prompt, tenant="two")[1] == 0
    assert Engine(llama, folder, page_size=16).ask(prompt, tenant="one")[1] == 0
    # The shapes are the same, one number differs.
    other = make_tiny_model(tmp_path / "other", "llama")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert Engine(other, folder).ask(prompt, tenant="one")[1] == 0


@pytest.fixture
def always_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute prefixes sooner than they are loaded."""
    monkeypatch.setattr(loading, "_TOKENS_AT_LEAST", 1 << 60)


@pytest.mark.usefixtures("always_loads")
def test_agents_in_turn_get_the_same_texts_from_a_cache_that_holds_few_of_them(
    llama: Path, tmp_path: Path
) -> None:
    agents = [prompt_of(seed, 100) for seed in range(8)]
    plain = Engine(llama, None, max_total_tokens=4096)
    tiered = Engine(llama, tmp_path, max_total_tokens=320)
    found = 0
    for _ in range(3):
        for number, prompt in enumerate(agents):
            expected, _ = plain.ask(prompt)
            tokens, cached = tiered.ask(prompt)
            found += cached
            assert tokens == expected
            agents[number] = [*prompt, *expected, *prompt_of(number + 50, 8)]
    assert found > 0.8 * sum(len(prompt) for prompt in agents)
    loading = tiered.engine._loading
    assert loading.loaded_tokens > found // 2 and not loading.failures


@pytest.mark.usefixtures("always_loads")
def test_several_requests_with_damaged_blocks_aborts_and_a_full_cache_lose_no_page(
    llama: Path, tmp_path: Path
) -> None:
    prompts = [prompt_of(seed % 4, 60 + 8 * seed) for seed in range(12)]
    plain = Engine(llama, None)
    expected = [plain.ask(prompt)[0] for prompt in prompts]
    first = Engine(llama, tmp_path)
    for prompt in prompts:
        first.ask(prompt)
    first.end()
    failures = 0
    for trial in range(6):
        for path in tmp_path.iterdir():
            data = bytearray(path.read_bytes())
            data[random.Random(trial).randrange(len(data))] ^= 4
            path.write_bytes(data)
        engine = Engine(llama, tmp_path, max_total_tokens=400)
        rids = [engine.add(prompt) for prompt in prompts]
        for _ in range(trial):
            engine.step()
        engine.engine.abort(rids[trial::5])
        answers, aborted = engine.run(), rids[trial::5]
        for rid, wanted in zip(rids, expected, strict=True):
            tokens, _ = answers.get(rid, ([], 0))
            assert tokens == (wanted[: len(tokens)] if rid in aborted else wanted)
        failures += engine.engine._loading.failures
        engine.end()
    assert failures > 0


def test_a_prefix_is_computed_if_that_is_sooner(llama: Path, tmp_path: Path) -> None:
    first = Engine(llama, tmp_path)
    first.ask(prompt_of(1))
    first.end()
    engine = Engine(llama, tmp_path)
    rule = engine.engine._loading
    message = GenerateRequest(rid="r", input_ids=prompt_of(1), params=PARAMS)
    found = rule._find(message)
    assert found is not None and found.gained == 112
    rule._token_seconds = 1e-3
    for factor, loads in ((0.9, True), (1.1, False)):
        rule._byte_seconds = factor * 112e-3 / found.num_bytes
        assert (rule._find(message) is not None) == loads


def fail(*_: Any) -> Any:
    raise RuntimeError("broken")


@pytest.fixture
def kept(llama: Path, tmp_path: Path) -> tuple[list[int], Engine]:
    """A text, and an engine that finds its prefix on disk."""
    first = Engine(llama, tmp_path)
    expected, _ = first.ask(prompt_of(1))
    first.end()
    return expected, Engine(llama, tmp_path)


def test_a_prefix_whose_reading_fails_is_computed(
    kept: tuple[list[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, engine = kept
    monkeypatch.setattr(Tiers, "read", fail)
    assert engine.ask(prompt_of(1)) == (expected, 0) and engine.engine._loading.failures == 1


def test_a_block_that_is_deleted_while_a_prefix_is_looked_up_leaves_no_gap(
    kept: tuple[list[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, engine = kept
    look_up, counts = Tiers._stored_after, list[int]()

    def delete_one(self: Tiers, *arguments: Any) -> list[bytes]:
        keys = look_up(self, *arguments)
        counts.append(len(keys))
        if len(counts) == 2:  # The first time, the request only learns that it has to wait.
            (store,) = self._stores
            assert isinstance(store, Segments)
            del store._index[keys[5]]
        return keys

    monkeypatch.setattr(Tiers, "_stored_after", delete_one)
    assert engine.ask(prompt_of(1))[0] == expected and counts[1] == 14


def test_blocks_that_cannot_be_copied_or_written_are_lost_and_later_ones_are_not(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("device")

    engine = Engine(llama, tmp_path)
    for number, (owner, name, broken) in enumerate(
        ((BlockCopies, "read", full), (Segments, "put", fail))
    ):
        monkeypatch.setattr(owner, name, broken)
        tiers = engine.engine._tiers
        assert tiers is not None
        before = tiers.lost
        engine.ask(prompt_of(number))
        while tiers._unwritten:
            time.sleep(0.001)  # Another thread writes.
        monkeypatch.undo()
        assert tiers.lost > before
    engine.ask(prompt_of(2))
    engine.end()
    assert Engine(llama, tmp_path).ask(prompt_of(2))[1] == 112


def test_a_flushed_cache_is_not_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiers, "unsaved", False)
    engine, prompt = Engine(llama, tmp_path), prompt_of(1)
    engine.ask(prompt)
    list(engine.engine.handle(FlushCache()))
    assert engine.ask(prompt)[1] == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_disk": "/tmp/x:3"}, "--kv-disk: '3'"),
        ({"kv_disk": ":8G"}, "names no folder"),
        ({"kv_disk": "/proc/kv:64M"}, "give a folder that can be written"),
        ({"kv_host_memory": "64M"}, "KV cache of a CPU is in the host's memory"),
        ({"kv_host_memory": "much"}, "--kv-host-memory: 'much' is no size"),
        ({"kv_disk": "/tmp/x", "tp_size": 2}, "--kv-disk needs an engine of one rank"),
        ({"kv_disk": "{folder}", "disable_radix_cache": True}, "leave --disable-radix-cache"),
        ({"kv_disk": "{folder}", "load_format": "dummy"}, "--load-format dummy"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_remedy(
    llama: Path, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    filled = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError) as error:
        Engine(llama, None, **filled)
    assert named in str(error.value)

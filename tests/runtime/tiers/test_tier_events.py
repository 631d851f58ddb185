"""KV events name the tier that has a block, and a folder works by any of its paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from piecework.runtime.cache.kv_events import KVEvents
from piecework.runtime.tiers import segments
from piecework.runtime.tiers.host_store import HostStore
from piecework.runtime.tiers.segments import Segments
from tests.runtime.models.variants import LLAMAS, OTHERS
from tests.runtime.text_engines import Engine, prompt_of


def hear(events: KVEvents, found: dict[str, set[int]]) -> list[dict[str, Any]]:
    """Update the blocks of each medium. Return the events."""
    heard = events.take()
    for event in heard:
        if event["type"] == "AllBlocksCleared":
            found.clear()
            continue
        blocks = found.setdefault(event["medium"], set())
        if event["type"] == "BlockStored":
            blocks.update(event["block_hashes"])
        else:
            blocks.difference_update(event["block_hashes"])
    return heard


def test_a_page_has_the_same_hash_in_the_cache_and_on_disk_after_a_restart_too(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    first = Engine(model, tmp_path / "kv")
    events = first.engine._core.cache.tree.events = KVEvents()
    assert first.engine._tiers is not None
    first.engine._tiers.report_to(events)
    first.ask(prompt_of(1))
    first.end()
    found = dict[str, set[int]]()
    hear(events, found)
    assert len(found["GPU"]) == 15 and found["FS"] == found["GPU"]
    second = Segments(tmp_path / "kv", 1 << 26)
    events.watch([second], 8)
    events.cleared()
    stored = hear(events, again := dict[str, set[int]]())[-1]
    assert again == {"FS": found["FS"]}
    assert (stored["token_ids"], stored["parent_block_hash"], stored["block_size"]) == ([], None, 8)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_events_follow_what_a_store_gets_and_drops(kind: str, tmp_path: Path) -> None:
    limit = 16 << 20
    store = HostStore(limit) if kind == "host" else Segments(tmp_path, limit)
    events, found = KVEvents(), dict[str, set[int]]()
    events.watch([store], 8)
    for number in range(1, 49):
        key = bytes([0, number, *bytes(18)])
        assert store.put(key, memoryview(bytes(1 << 19)))
        hear(events, found)
        assert found[store.medium] == {key[1] for key in store.block_keys()}
    assert len(store.block_keys()) < 48
    assert store.medium == ("CPU" if kind == "host" else "FS")


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_page_with_blocks_of_several_kinds_is_announced_once(name: str, tmp_path: Path) -> None:
    architecture, overrides = {**LLAMAS, **OTHERS}[name]
    engine = Engine(make_tiny_model(tmp_path / "m", architecture, **overrides), tmp_path / "kv")
    events = engine.engine._core.cache.tree.events = KVEvents()
    assert engine.engine._tiers is not None
    engine.engine._tiers.report_to(events)
    engine.ask(prompt_of(1))
    engine.end()
    told = [block for event in events.take() if event["type"] == "BlockStored"
            and event["medium"] == "FS" for block in event["block_hashes"]]  # fmt: skip
    assert len(told) == len(set(told)) == 15
    assert len(Segments(tmp_path / "kv", 1 << 26).block_keys()) > 15


def test_two_engines_share_a_folder_that_they_reach_by_two_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LOOK_SECONDS", 0.0)
    model, prompt = make_tiny_model(tmp_path / "model", "llama"), prompt_of(1)
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "mount").symlink_to(tmp_path / "kv")
    first, second = Engine(model, tmp_path / "kv"), Engine(model, tmp_path / "mount")
    expected, _ = first.ask(prompt)
    first.end()
    assert second.ask(prompt) == (expected, 112)

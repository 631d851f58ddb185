"""Who hears every event knows what the prefix tree holds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.cache.kv_events import KVEvents, block_hash
from piecework.runtime.cache.radix import RadixCache
from piecework.runtime.config.kv_events import KVEventsConfig, is_bound
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.images import ImageInput
from piecework.runtime.core.sampling_params import SamplingParams


class Subscriber:
    """Rebuilds the set of blocks, and their tokens, from events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def hear(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block]
            else:
                _, hashes, parent, tokens, size, *_ = event.values()
                assert len(tokens) == size * len(hashes) and not set(hashes) & set(self.blocks)
                before = () if parent is None else self.blocks[parent]
                for number, block in enumerate(hashes):
                    before += tuple(tokens[number * size : (number + 1) * size])
                    self.blocks[block] = before


def blocks_of(cache: RadixCache, page_size: int) -> dict[int, tuple[int, ...]]:
    """What the tree holds, by hashes that are made anew."""
    found: dict[int, tuple[int, ...]] = {}
    stack = [(child, (), None) for child in cache.root.children.values()]
    while stack:
        node, before, parent = stack.pop()
        for begin in range(0, len(node.tokens), page_size):
            page = node.tokens[begin : begin + page_size]
            parent, before = block_hash(parent, page), (*before, *page.tolist())
            found[parent] = before
        stack += [(child, before, parent) for child in node.children.values()]
    return found


@given(
    steps=st.lists(st.lists(st.integers(0, 1), max_size=9) | st.integers(1, 5), max_size=14),
    page_size=st.sampled_from([1, 2]),
)
def test_a_subscriber_knows_the_tree(steps: list[list[int] | int], page_size: int) -> None:
    """Prompts are inserted, and so many pages are evicted."""
    events = KVEvents()
    cache = RadixCache(page_size, [], events=events)
    subscriber = Subscriber()
    for step in steps:
        if isinstance(step, int):
            cache.evict(step)
        else:
            cache.extend(np.array(step[: len(step) // page_size * page_size], np.int64))
        subscriber.hear(events.take())
        assert subscriber.blocks == blocks_of(cache, page_size)


def test_a_block_has_the_same_hash_in_each_process_and_behind_its_parent_alone() -> None:
    page = np.arange(4)
    assert block_hash(None, page) == block_hash(None, page.astype(np.int32)) == 16958249009808338657
    assert len({block_hash(parent, page) for parent in (None, 0, 1)}) == 3


def test_equal_pages_of_two_namespaces_are_two_blocks() -> None:
    events = KVEvents()
    cache = RadixCache(2, [], events=events)
    subscriber = Subscriber()
    for namespace in (b"", b"a", b"b"):
        cache.extend(np.arange(4), namespace)
    subscriber.hear(events.take())
    assert len(subscriber.blocks) == 6
    cache.evict(2)
    subscriber.hear(events.take())
    assert len(subscriber.blocks) == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"endpont": "x"}', "'endpont'"),
        ('{"hwm": true}', "hwm must be of type int"),
        ('{"hwm": 0}', "hwm must lie between"),
        ('{"buffer_steps": 10000000000}', "buffer_steps must lie between"),
        ('{"publisher": "kafka"}', "publisher must be zmq or null"),
        ('{"layout": "list"}', "layout must be map or array"),
        ('{"endpoint": "inproc://x"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://127.0.0.1"}', "names no host and port"),
        ('{"replay_endpoint": "tcp://*:99999"}', "names no host and port"),
    ],
)
def test_a_bad_setting_is_told_by_its_name(text: str, named: str) -> None:
    with pytest.raises(ValueError, match="--kv-events-config") as error:
        KVEventsConfig.parse(text)
    assert named in str(error.value) and len(str(error.value)) < 300


def test_replicas_have_endpoints_of_their_own() -> None:
    told = {"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/r"}
    config = KVEventsConfig.parse(json.dumps(told))
    assert config.of_replica(0) == ("tcp://*:5557", "ipc:///tmp/r")
    assert config.of_replica(2) == ("tcp://*:5559", "ipc:///tmp/r_dp2")


@pytest.mark.parametrize(
    ("endpoint", "replay", "most"),
    [
        ("tcp://*:5557", None, 64),
        ("tcp://*:5557", "tcp://*:5558", 1),
        ("tcp://*:5560", "tcp://127.0.0.1:5557", 3),
        ("tcp://*:65534", None, 2),
        ("ipc:///tmp/a", "ipc:///tmp/b", 64),
        ("tcp://router:5557", "tcp://*:5558", 64),
        ("ipc:///tmp/a", "ipc:///tmp/a", 0),
    ],
)
def test_no_two_engines_listen_at_one_place(endpoint: str, replay: str | None, most: int) -> None:
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay)
    config.check_replicas(most)
    if most < 64:
        with pytest.raises(ValueError, match=f"at least {most + 1} ports apart"):
            config.check_replicas(most + 1)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:1", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://collector:1", False),
    ],
)
def test_it_listens_on_its_own_addresses_and_connects_to_others(endpoint: str, bound: bool) -> None:
    assert is_bound(endpoint) is bound


def test_positions_of_images_have_ids_that_routers_can_hold() -> None:
    events = KVEvents()
    names = [
        ImageInput(start=0, length=4, digest=bytes([seed] * 16), tensors={}).names()
        for seed in range(2)
    ]
    hashes = [events.stored(None, each, 2) for each in names]
    assert not set(hashes[0]) & set(hashes[1])
    for event in events.take()[1:]:
        assert all(0 <= token < 2**31 for token in event["token_ids"])


def test_blocks_of_an_adapter_name_it() -> None:
    events = KVEvents()
    events.name_of_adapter = {"1f": "sql"}.get
    cache = RadixCache(2, [], events=events)
    told = []
    for adapter, tenant in (("", ""), ("1f", ""), ("1f", "key"), ("2e", ""), ("", "1f")):
        message = GenerateRequest(
            rid="r", input_ids=[], params=SamplingParams(), adapter=adapter, tenant=tenant
        )
        for end in (2, 4):  # The second block has a parent.
            cache.extend(np.arange(end), message.namespace)
        told.append([(each["lora_name"], each["lora_id"]) for each in events.take()[-2:]])
    number = told[1][0][1]
    assert 0 < number < 2**31
    assert told[:3] == [[(None, None)] * 2, [("sql", number)] * 2, [("sql", number)] * 2]
    assert told[3][0][0] is None and told[3][0][1] not in (None, number)
    assert told[4] == [(None, None)] * 2

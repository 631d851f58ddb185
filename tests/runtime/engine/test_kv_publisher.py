"""KV events on the wire, read as vLLM's subscribers read them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from piecework.runtime.cache.kv_events import KVEvents
from piecework.runtime.config.kv_events import KVEventsConfig
from piecework.runtime.engine.kv_publisher import KVPublisher


# Members and their order: vllm/distributed/kv_events.py.
class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


# The same in the layout of older versions.
class StoredRow(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BatchRow(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredRow]
    data_parallel_rank: int | None = None


def config(folder: Path, **settings: Any) -> KVEventsConfig:
    return KVEventsConfig(
        endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", **settings
    )


def connect(kind: int, endpoint: str) -> Any:
    socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    return socket


def replayed(folder: Path, first: int, kind: Any = Batch) -> list[tuple[int, Any]]:
    asked, found = connect(zmq.DEALER, f"ipc://{folder}/replay"), []
    asked.send_multipart((b"", first.to_bytes(8, "big")))
    while True:
        _, number, payload = asked.recv_multipart()
        if not payload:
            assert int.from_bytes(number, "big", signed=True) == -1
            asked.close()
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=kind)))


def test_both_layouts_are_read_as_they_are_declared(tmp_path: Path) -> None:
    kinds: list[tuple[str, Any]] = [("map", Batch), ("array", BatchRow)]
    for layout, kind in kinds:
        (folder := tmp_path / layout).mkdir()
        publisher = KVPublisher(config(folder, layout=layout), replica=0)
        publisher.events.take()
        hashes = publisher.events.stored(None, np.arange(8), 4)
        publisher.publish()
        ((_, batch),) = replayed(folder, 0, kind)
        (event,) = batch.events
        assert event.block_hashes == hashes and event.token_ids == list(range(8))
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, 4, "GPU")


def remove(events: KVEvents, block: int) -> None:
    events.removed([block])


def test_a_subscriber_that_came_late_has_what_it_missed_replayed(tmp_path: Path) -> None:
    publisher = KVPublisher(config(tmp_path, topic="kv", buffer_steps=3), replica=1)
    publisher.events.take()
    # A replica's own files.
    folder = tmp_path
    for end in ("pub", "replay"):
        (folder / end).symlink_to(folder / f"{end}_dp1")
    missed = 2
    for block in range(missed):
        remove(publisher.events, block)
        publisher.publish()
    subscriber = connect(zmq.SUB, f"ipc://{folder}/pub")
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    heard: list[list[bytes]] = []
    sent = missed
    while not heard:
        remove(publisher.events, sent)
        publisher.publish()
        sent += 1
        assert sent < 2000
        time.sleep(0.005)
        if subscriber.poll(0):
            heard.append(subscriber.recv_multipart())
    topic, number, payload = heard[0]
    batch = msgspec.msgpack.decode(payload, type=Batch)
    assert topic == b"kv" and batch.data_parallel_rank == 1 and abs(batch.ts - time.time()) < 60
    first = int.from_bytes(number, "big")
    assert batch.events == [BlockRemoved([first], "GPU")]
    before = replayed(folder, 0)
    assert [one for one, _ in before] == list(range(sent - 3, sent))
    publisher.publish()
    assert len(replayed(folder, sent - 1)) == 1
    subscriber.close()


def test_the_first_batch_says_that_nothing_is_left_of_an_earlier_engine(tmp_path: Path) -> None:
    publisher = KVPublisher(config(tmp_path), replica=0)
    publisher.publish()
    ((number, batch),) = replayed(tmp_path, 0)
    assert (number, batch.events) == (0, [AllBlocksCleared()])


def test_who_never_reads_holds_nobody_up(tmp_path: Path) -> None:
    publisher = KVPublisher(config(tmp_path, hwm=2, max_queue_size=2, buffer_steps=5), replica=0)

    def seconds() -> float:
        began = time.monotonic()
        for block in range(300):
            remove(publisher.events, block)
            publisher.publish()
        return time.monotonic() - began

    alone = seconds()
    silent = connect(zmq.SUB, f"ipc://{tmp_path}/pub")
    silent.set_hwm(1)
    silent.setsockopt(zmq.SUBSCRIBE, b"")
    # A wait of 50 ms for each event would take 100 times as long.
    assert seconds() < 30 * alone
    assert len(replayed(tmp_path, 0)) <= 5
    silent.close()


def test_nonsense_on_the_replay_socket_is_left_alone(tmp_path: Path) -> None:
    publisher = KVPublisher(config(tmp_path), replica=0)
    publisher.publish()
    rude = connect(zmq.DEALER, f"ipc://{tmp_path}/replay")
    for frames in ([b"x"], [b"", b"short"], [b"", b"x" * 8, b"", b""]):
        rude.send_multipart(frames)
    assert len(replayed(tmp_path, 0)) == 1
    rude.close()


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    nowhere = KVEventsConfig(endpoint=f"ipc://{tmp_path}/none/pub")
    with pytest.raises(ValueError, match=r"--kv-events-config: cannot open ipc://.*none/pub"):
        KVPublisher(nowhere, replica=0)

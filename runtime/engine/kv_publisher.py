"""Publishes KV events over ZeroMQ, in vLLM's protocol.

A PUB socket publishes batches with consecutive numbers. A message is (topic, number as 8 bytes
big-endian, msgpack of [time, events, replica]). A ROUTER socket replays the last batches for
subscribers that missed some. A subscriber sends (empty, first number) and gets (empty, number,
msgpack) for each batch from that number on, then number -1 with an empty payload.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import count
from typing import Any

import msgspec
import zmq

from ..cache.kv_events import KVEvents
from ..config.kv_events import FLAG, KVEventsConfig, is_bound

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_KEPT_BYTES = 2**28  # Limit of the batches that are kept for replay.
_BATCHES_PER_POLL = 1000
_QUEUE = "inproc://kv-events"


class KVPublisher:
    """Publishes the events of `events`.

    A thread sends them, so that no subscriber can block the engine. If its queue is full, the batch
    is lost and its number is skipped.
    """

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        """Raise `ValueError` if an endpoint cannot be bound or connected."""
        self.events = KVEvents()
        self._replica, self._numbers = replica, count()
        self._as_arrays = config.layout == "array"
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[Any] = zmq.Context()
        endpoint, replay_endpoint = config.of_replica(replica)
        publisher = self._open(zmq.PUB, endpoint, config.hwm)
        replay = replay_endpoint and self._open(
            zmq.ROUTER, replay_endpoint, config.buffer_steps + 1
        )
        inbox = self._context.socket(zmq.PULL)
        inbox.set_hwm(config.max_queue_size)
        inbox.bind(_QUEUE)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(config.max_queue_size)
        self._outbox.connect(_QUEUE)
        sender = _Sender(inbox, publisher, replay or None, config)
        threading.Thread(target=sender.run, name="kv events", daemon=True).start()

    def publish(self) -> None:
        """Publish the events since the last call as one batch, if there are any. Never blocks."""
        if not (events := self.events.take()):
            return
        number = next(self._numbers).to_bytes(8, "big")
        rows = [list(event.values()) for event in events] if self._as_arrays else events
        payload = self._encode([time.time(), rows, self._replica])
        try:
            self._outbox.send_multipart((number, payload), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning(
                "a batch of KV events is lost: the queue is full; raise max_queue_size of %s", FLAG
            )

    def _open(self, kind: int, endpoint: str, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            (socket.bind if is_bound(endpoint) else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{FLAG}: cannot open {endpoint}: {error.strerror}") from None
        return socket


class _Sender:
    """The thread that sends and replays batches. It owns the sockets."""

    def __init__(self, inbox: Any, publisher: Any, replay: Any, config: KVEventsConfig) -> None:
        self._inbox, self._publisher, self._replay = inbox, publisher, replay
        self._topic = config.topic.encode()
        self._most = config.buffer_steps if replay is not None else 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._inbox, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            try:
                # Queued batches first, so that a replay includes them.
                for _ in range(_BATCHES_PER_POLL):
                    if not self._inbox.poll(0):
                        break
                    self._send(*self._inbox.recv_multipart())
                if self._replay in ready:
                    self._answer(self._replay.recv_multipart())
            except zmq.ZMQError as error:
                logger.warning("KV events: %s", error)

    def _send(self, number: bytes, payload: bytes) -> None:
        self._publisher.send_multipart((self._topic, number, payload))
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept and (len(self._kept) > self._most or self._kept_bytes > _KEPT_BYTES):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((client, b"", number, payload))
        self._replay.send_multipart((client, b"", _END, b""))

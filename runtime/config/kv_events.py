"""Where the events of the prefix tree go: `--kv-events-config`.

Names and defaults: vllm/config/kv_events.py.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, fields

FLAG = "--kv-events-config"
_MOST = 1_000_000
_LAST_PORT = 65535
_SCHEMES = ("tcp://", "ipc://")
_KINDS = {"enable_kv_cache_events": bool, "buffer_steps": int, "hwm": int, "max_queue_size": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where events go. Raises `ValueError` with a remedy.

    Attributes:
        endpoint: Address of a PUB socket.
        replay_endpoint: Address of a ROUTER socket, which sends the last `buffer_steps` batches.
        hwm: Batches that wait for a slow subscriber. Later ones are lost.
        max_queue_size: Batches that wait to be published.
        layout: "map", as vLLM, SGLang and their routers use it now, or "array", as in their first
            versions.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 10_000
    topic: str = ""
    layout: str = "map"

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """Read a JSON object with these members."""
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{FLAG} is not JSON ({error}); give an object {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{FLAG} is not a JSON object; give one like {_EXAMPLE}")
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{FLAG}: no member {name!r:.50}; there are {', '.join(known)}")
            kind = _KINDS.get(name, str)
            if type(value) is not kind and not (name == "replay_endpoint" and value is None):
                raise ValueError(f"{FLAG}: {name} must be of type {kind.__name__}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f"{FLAG}: publisher must be zmq or null, got {self.publisher!r:.50}")
        if self.layout not in ("map", "array"):
            raise ValueError(f"{FLAG}: layout must be map or array, got {self.layout!r:.50}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ValueError(
                    f"{FLAG}: {name} must lie between 1 and {_MOST}, got {getattr(self, name)}"
                )
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                _check_endpoint(name, value)

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def check_replicas(self, count: int) -> None:
        """Raise `ValueError` if two of `count` engines would bind the same address."""
        taken: set[str] = set()
        for endpoint in (each for number in range(count) for each in self.of_replica(number)):
            if not self.is_on or endpoint is None or not is_bound(endpoint):
                continue
            place = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint
            if place in taken or (place.isdigit() and int(place) > _LAST_PORT):
                raise ValueError(
                    f"{FLAG}: {count} engines cannot all bind, because {endpoint} is taken twice "
                    "or is not a port. Replica N binds the port N higher: keep endpoint and "
                    f"replay_endpoint at least {count} ports apart"
                )
            taken.add(place)

    def of_replica(self, number: int) -> tuple[str, str | None]:
        """Return the endpoints of replica `number`: the next port, or a file of its own."""
        return _offset(self.endpoint, number), self.replay_endpoint and _offset(
            self.replay_endpoint, number
        )

    def addresses(self, number: int) -> dict[str, str | None] | None:
        """Describe the endpoints of replica `number` for `/server_info`. None if events are off."""
        if not self.is_on:
            return None
        endpoint, replay = self.of_replica(number)
        return {"endpoint": endpoint, "replay_endpoint": replay, "topic": self.topic}


_EXAMPLE = """'{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}'"""


def _check_endpoint(name: str, value: str) -> None:
    if not value.startswith(_SCHEMES) or "\0" in value:
        raise ValueError(
            f"{FLAG}: {name} {value!r:.80} must be tcp://HOST:PORT, or ipc:// and a file"
        )
    if value.startswith("tcp://"):
        host, _, port = value.removeprefix("tcp://").rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
            raise ValueError(f"{FLAG}: {name} {value!r:.80} names no host and port")


def _offset(endpoint: str, number: int) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{number}" if number else endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + number}"


def is_bound(endpoint: str) -> bool:
    """Whether the publisher binds this endpoint: a file, all addresses, or the loopback address.

    Otherwise it connects to a listener there.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if endpoint.startswith("ipc://") or host in ("*", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

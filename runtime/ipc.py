"""Messages on the wire: msgpack over ZeroMQ sockets in the file system, one pair for each life of the engine process."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import zmq

from .messages import FromEngine, ToEngine

_TYPES: dict[bytes, type] = {cls.__name__.encode(): cls for cls in (*get_args(ToEngine), *get_args(FromEngine))}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {name: msgspec.msgpack.Decoder(cls) for name, cls in _TYPES.items()}


def encode(message: ToEngine | FromEngine) -> list[bytes]:
    """Two frames: the message's type and its msgpack."""
    return [type(message).__name__.encode(), _ENCODER.encode(message)]


def decode(frames: list[bytes]) -> Any:
    """The message of two frames."""
    name, payload = frames
    return _DECODERS[name].decode(payload)


def open_socket(context: zmq.Context[Any], kind: int, endpoint: str, *, bind: bool) -> Any:
    """A PUSH or PULL socket without a limit on queued messages: a lost message would be a lost request."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    (socket.bind if bind else socket.connect)(endpoint)
    return socket

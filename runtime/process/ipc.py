"""Encodes and decodes messages: the name of their type and their msgpack."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from ..core.images import Preprocessing
from ..core.messages import FromEngine, ToEngine

_TYPES: dict[bytes, type] = {
    cls.__name__.encode(): cls
    for cls in (*get_args(ToEngine), *get_args(FromEngine), *get_args(Preprocessing))
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(cls) for name, cls in _TYPES.items()
}


def encode(message: ToEngine | FromEngine | Preprocessing) -> list[bytes]:
    """Return two frames: the name of the message's type and its msgpack."""
    return [type(message).__name__.encode(), _ENCODER.encode(message)]


class Unreadable(ValueError):
    """A message that cannot be decoded.

    `known` says whether its type is known. `rids` are the request ids that could be read from it.
    """

    def __init__(self, name: bytes, reason: str, *, known: bool, rids: list[str]) -> None:
        super().__init__(f"{name.decode(errors='replace')}: {reason}")
        self.known = known
        self.rids = rids


def decode(frames: list[bytes]) -> Any:
    """Decode the message of two frames. Raise `Unreadable` if that is not possible."""
    name, payload = frames[0], frames[-1]
    decoder = _DECODERS.get(name)
    try:
        if decoder is not None and len(frames) == 2:
            return decoder.decode(payload)
        reason = f"not a message of {len(frames)} frames" if decoder else "no such message"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    raise Unreadable(name, reason, known=decoder is not None, rids=_rids(payload))


def _rids(payload: bytes) -> list[str]:
    """Return the request ids in a message of any form: its own and those of its outputs."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    if not isinstance(fields, dict):
        return []
    outputs = fields.get("outputs")
    entries = (
        [fields, *(entry for entry in outputs if isinstance(entry, dict))]
        if isinstance(outputs, list)
        else [fields]
    )
    found = [entry.get("rid") for entry in entries]
    return [rid for rid in found if isinstance(rid, str)]

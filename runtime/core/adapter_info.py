"""What an engine tells of an adapter (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """One adapter that an engine has loaded.

    Attributes:
        identity: A hash of the contents. An adapter that is loaded again with other contents has
            another identity. Requests, prefixes of the cache and KV events name it by this.
        name: The last name under which it was loaded.
        path: The folder or file that it was read from.
        rank: The largest rank of its matrices.
        num_layers: Number of projections that it changes.
        num_bytes: Memory of its matrices on the host, on the first rank.
        is_resident: Whether it has a slot on the device.
    """

    identity: str
    name: str
    path: str
    rank: int
    num_layers: int
    num_bytes: int
    is_resident: bool = False

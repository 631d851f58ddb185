"""Keeps the images behind URLs in memory, until they expire or newer images need the room."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class StoredImage(NamedTuple):
    """A file and the time of its expiry, on the store's clock."""

    content: bytes
    media_type: str
    expires: float


class ImageStore:
    """Holds at most `capacity` bytes, and each image for `lifetime` seconds.

    Names cannot be guessed, so everybody who knows a name may fetch the image.
    """

    def __init__(
        self, capacity: int, lifetime: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._lifetime = lifetime
        self._clock = clock
        self._images: OrderedDict[str, StoredImage] = OrderedDict()
        self.size = 0  # Bytes.

    def put(self, content: bytes, extension: str, media_type: str) -> str:
        """Store an image and return its name. Raises `ValueError` if it exceeds `capacity`."""
        if len(content) > self._capacity:
            raise ValueError(
                f"the image has {len(content)} bytes, more than the {self._capacity} that may be "
                "kept"
            )
        name = f"{secrets.token_urlsafe(24)}.{extension}"
        self._images[name] = StoredImage(content, media_type, self._clock() + self._lifetime)
        self.size += len(content)
        self._make_room()
        return name

    def get(self, name: str) -> StoredImage | None:
        """Return an image, or None if it is unknown or expired."""
        self._make_room()
        return self._images.get(name)

    def _make_room(self) -> None:
        """Drop expired images, and the oldest ones while the store is too large.

        All images live equally long, so the oldest expires first.
        """
        while self._images:
            oldest = next(iter(self._images.values()))
            if self.size <= self._capacity and oldest.expires > self._clock():
                return
            self._images.popitem(last=False)
            self.size -= len(oldest.content)

"""The server that a measurement talks to, and its request format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit


class Api(StrEnum):
    """The endpoint that requests go to."""

    COMPLETION = "completion"
    CHAT = "chat"
    GENERATE = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server.

    `keep_alive` False opens a connection for each request. Raises `ValueError` if `base_url` is not
    an HTTP URL.
    """

    base_url: str
    api: Api = Api.COMPLETION
    model: str | None = None  # None: the first that the server lists.
    api_key: str | None = None
    timeout: float = 600.0  # Maximum seconds of a request.
    keep_alive: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.base_url!r} is no URL of a server; give one like http://127.0.0.1:30000"
            )
        # Paths begin with /v1 here, but most clients expect it in the base URL, so accept both.
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

"""Which server a measurement talks to, and in which of the three request formats."""

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
    """A server. `model` None: the first that it lists. `timeout`: seconds that one request may
    take.

    `keep_alive` False opens a connection for each request. Raises `ValueError` where `base_url` is
    no http(s) URL.
    """

    base_url: str
    api: Api = Api.COMPLETION
    model: str | None = None
    api_key: str | None = None
    timeout: float = 600.0
    keep_alive: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.base_url!r} is no URL of a server; give one like http://127.0.0.1:30000"
            )
        # The paths of the OpenAI endpoints begin with /v1 themselves; most clients want it in the
        # base URL.
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

"""What requests with each key of `--api-keys` have used, and whether another one may begin."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextvars import ContextVar

from ..config.keys import Key, hash_of, read_keys
from ..core.errors import Forbidden, NotFound, TooManyRequests
from ..observability.request_record import RequestRecord

logger = logging.getLogger(__name__)

ACCOUNT = "piecework.account"
"""Of a request's scope: the account that it is counted for."""
_BUSY_SECONDS = 1
"""What `Retry-After` says where as many requests as may are under way."""
_OWN_PATHS = frozenset(
    {"/generate", "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/classify",
     "/model_info", "/get_model_info", "/tokenizer_info", "/version", "/docs", "/openapi.json"}
)  # fmt: skip
"""What any key may ask for outside of /v1."""
_SHARED_PATHS = ("/v1/files", "/v1/batches")
"""What lies there is everybody's, and is computed for nobody's account."""
_LIMITED = ("requests", "tokens")
_OF_A_LIMIT = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{name}-{kind}" for kind in _LIMITED for name in _OF_A_LIMIT
)


class Bucket:
    """An allowance of so many a minute, all of which may be used at once. It may be overdrawn, for
    tokens are counted once they are made.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        earned = max(0.0, now - self._at) * self.per_minute / 60
        self._level = min(self.per_minute, self._level + earned)
        self._at = max(self._at, now)
        return self._level

    def take(self, count: float, now: float) -> None:
        self._level = self.level(now) - count

    def seconds_until(self, wanted: float, now: float) -> float:
        """From now until there is as much."""
        return max(0.0, wanted - self.level(now)) * 60 / self.per_minute


class Account:
    """The use of one key. `active`: its requests under way."""

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        self.active: set[RequestRecord] = set()
        self.requests = self._bucket(key.requests_per_minute, None, now)
        self.tokens = self._bucket(key.tokens_per_minute, None, now)

    def change(self, key: Key, now: float) -> None:
        """Other limits; what was used stays used."""
        self.key = key
        self.requests = self._bucket(key.requests_per_minute, self.requests, now)
        self.tokens = self._bucket(key.tokens_per_minute, self.tokens, now)

    @staticmethod
    def _bucket(per_minute: int | None, before: Bucket | None, now: float) -> Bucket | None:
        if per_minute is None:
            return None
        bucket = Bucket(per_minute, now)
        if before is not None:
            bucket.take(before.per_minute - before.level(now), now)
        return bucket

    def begin(self, record: RequestRecord, now: float) -> None:
        """Count a request, which `end` ends. Raises `TooManyRequests`."""
        key = self.key
        if key.concurrency is not None and len(self.active) >= key.concurrency:
            raise _too_many(f"{key.concurrency} requests at once", _BUSY_SECONDS)
        if self.tokens is not None:
            # Those under way have not been taken yet.
            seconds = self.tokens.seconds_until(1 + self._unfinished(), now)
            if seconds > 0:
                raise _too_many(f"{key.tokens_per_minute} tokens a minute", seconds)
        if self.requests is not None:
            if (seconds := self.requests.seconds_until(1, now)) > 0:
                raise _too_many(f"{key.requests_per_minute} requests a minute", seconds)
            self.requests.take(1, now)
        self.active.add(record)

    def end(self, record: RequestRecord, now: float) -> None:
        """The request is over, however it ended; its tokens are known."""
        if record in self.active:
            self.active.discard(record)
            if self.tokens is not None:
                self.tokens.take(record.tokens, now)

    def _unfinished(self) -> int:
        return sum(record.tokens for record in self.active)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-*`, of the limits that there are."""
        found = []
        for kind, bucket in zip(_LIMITED, (self.requests, self.tokens), strict=True):
            if bucket is not None:
                used = self._unfinished() if kind == "tokens" else 0
                values = (
                    str(bucket.per_minute),
                    str(max(0, math.floor(bucket.level(now)) - used)),
                    f"{bucket.seconds_until(bucket.per_minute, now):.3f}s",
                )
                found += [
                    (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
                    for name, value in zip(_OF_A_LIMIT, values, strict=True)
                ]
        return found


def _too_many(limit: str, seconds: float) -> TooManyRequests:
    wait = math.ceil(seconds)
    return TooManyRequests(
        f"Rate limit reached: this API key may use {limit}. Try again in {wait} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(wait)},
    )


class Accounts:
    """An account for each key of a file. `now`: seconds that never jump. Raises `ValueError` where
    the file is wrong.
    """

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self.now = now
        self._by_hash: dict[str, Account] = {}
        self._take(read_keys(path))

    def find(self, key: bytes) -> Account | None:
        """The account of a key that a client sent. What is looked up is its hash, so the time that
        this takes tells nothing of a key.
        """
        return self._by_hash.get(hash_of(key))

    async def reload(self) -> None:
        """Read the file again; one that is wrong is logged, and changes nothing."""
        try:
            keys = await asyncio.to_thread(read_keys, self._path)
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._take(keys)
        logger.info("%d API keys are read from %s", len(keys), self._path)

    def _take(self, keys: dict[str, Key]) -> None:
        now = self.now()
        before = {account.key.name: account for account in self._by_hash.values()}
        by_hash = {}
        for digest, key in keys.items():
            if (account := before.get(key.name)) is None:
                account = Account(key, now)
            else:
                account.change(key, now)
            by_hash[digest] = account
        self._by_hash = by_hash

    def end(self, record: RequestRecord) -> None:
        """A watcher of records: gives back what the request held."""
        account: Account | None = record.scope.get(ACCOUNT)
        if account is not None:
            account.end(record, self.now())


current_key: ContextVar[Key | None] = ContextVar("current_key", default=None)
"""That the HTTP request came with which is being answered."""


def check_path(key: Key, method: str, path: str) -> None:
    """Raises `Forbidden` for what would reach beyond the requests of this key."""
    shared = path.startswith(_SHARED_PATHS) or (
        path.startswith("/v1/models") and method not in ("GET", "HEAD")
    )
    if not key.admin and (shared or not (path.startswith("/v1/") or path in _OWN_PATHS)):
        raise Forbidden(
            f"This API key may not use {path[:200]}, which is everybody's; ask with a key that "
            "has `admin: true`.",
            code="insufficient_permissions",
        )


def is_counted(method: str, path: str) -> bool:
    """Whether a request counts for its key: whoever has reached a limit may still end what runs."""
    return method in ("POST", "PUT") and not path.endswith("/cancel")


def may_use(model: str) -> bool:
    """Whether the request that is being answered may use this model."""
    key = current_key.get()
    return key is None or key.models is None or model in key.models


def check_access(model: str) -> None:
    """Raises `NotFound` for a model that is not for the key of this request."""
    if not may_use(model):
        message = f"The model {model!r:.200} does not exist, or your API key may not use it."
        raise NotFound(message, param="model", code="model_not_found")


def allowed_priority(priority: int) -> int:
    """A request's priority, of which a key says how high it may be."""
    key = current_key.get()
    return priority if key is None else key.priority + min(0, priority)

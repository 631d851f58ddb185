"""Accounts of the keys of `--api-keys`: what a key has used and whether it may start more."""

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

ACCOUNT = "piecework.account"  # Key of a request's scope: the account of the request.
_BUSY_SECONDS = 1  # `Retry-After` if too many requests of the key run at once.
_ANY_KEY = ("/v1/", "/api/")  # Folders that any key may use.
# Paths outside of these folders that any key may use.
_OWN_PATHS = frozenset(
    {"/completion", "/completions", "/infill", "/apply-template", "/props",
     "/generate", "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/classify",
     "/model_info", "/get_model_info", "/tokenizer_info", "/version", "/docs", "/openapi.json"}
)  # fmt: skip
# Files and batches are shared by all keys and not counted for an account.
_SHARED_PATHS = ("/v1/files", "/v1/batches", "/v1/load_lora_", "/v1/unload_lora_")
_LIMITED = ("requests", "tokens")
_LIMIT_FIELDS = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{name}-{kind}" for kind in _LIMITED for name in _LIMIT_FIELDS
)


class Bucket:
    """A token bucket of `per_minute` units, all of which may be used at once.

    Its level may become negative, because generated tokens are counted when a request ends.
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
        """Return the seconds until the level reaches `wanted`."""
        return max(0.0, wanted - self.level(now)) * 60 / self.per_minute


class Account:
    """The usage of one key. `active` holds its unfinished requests."""

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        self.active: set[RequestRecord] = set()
        self.requests = self._bucket(key.requests_per_minute, None, now)
        self.tokens = self._bucket(key.tokens_per_minute, None, now)

    def change(self, key: Key, now: float) -> None:
        """Set other limits and keep what was used."""
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
        """Count a request until `end`. Raises `TooManyRequests`."""
        key = self.key
        if key.concurrency is not None and len(self.active) >= key.concurrency:
            raise _too_many(f"{key.concurrency} requests at once", _BUSY_SECONDS)
        if self.tokens is not None:
            # The tokens of unfinished requests are not yet taken from the bucket.
            seconds = self.tokens.seconds_until(1 + self._unfinished(), now)
            if seconds > 0:
                raise _too_many(f"{key.tokens_per_minute} tokens a minute", seconds)
        if self.requests is not None:
            if (seconds := self.requests.seconds_until(1, now)) > 0:
                raise _too_many(f"{key.requests_per_minute} requests a minute", seconds)
            self.requests.take(1, now)
        self.active.add(record)

    def end(self, record: RequestRecord, now: float) -> None:
        """Finish a request and count its tokens."""
        if record in self.active:
            self.active.discard(record)
            if self.tokens is not None:
                self.tokens.take(record.tokens, now)

    def _unfinished(self) -> int:
        return sum(record.tokens for record in self.active)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Return the `x-ratelimit-*` headers of OpenAI for the key's limits."""
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
                    for name, value in zip(_LIMIT_FIELDS, values, strict=True)
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
    """The accounts of the keys of a file. `now` is a monotonic clock in seconds.

    Raises `ValueError` if the file is invalid.
    """

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self.now = now
        self._by_hash: dict[str, Account] = {}
        self._take(read_keys(path))

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key that a client sent.

        The key's hash is looked up, so the duration reveals nothing about the keys.
        """
        return self._by_hash.get(hash_of(key))

    async def reload(self) -> None:
        """Read the file again. If it is invalid, log the error and keep the keys."""
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
        """End a request for its account. This is a watcher of records."""
        account: Account | None = record.scope.get(ACCOUNT)
        if account is not None:
            account.end(record, self.now())


# The key of the HTTP request that is being answered.
current_key: ContextVar[Key | None] = ContextVar("current_key", default=None)


def check_path(key: Key, method: str, path: str) -> None:
    """Raise `Forbidden` if the path affects other keys and this key has no `admin`."""
    shared = path.startswith(_SHARED_PATHS) or (
        path.startswith("/v1/models") and method not in ("GET", "HEAD")
    )
    if not key.admin and (shared or not (path.startswith(_ANY_KEY) or path in _OWN_PATHS)):
        raise Forbidden(
            f"This API key may not use {path[:200]}, which affects all keys; use a key with "
            "`admin: true`.",
            code="insufficient_permissions",
        )


def is_counted(method: str, path: str) -> bool:
    """Whether a request counts against the limits. Cancellations never do."""
    return method in ("POST", "PUT") and not path.endswith("/cancel")


def may_use(model: str) -> bool:
    """Return whether the key of the current request may use this model."""
    key = current_key.get()
    return key is None or key.models is None or model in key.models


def may_unload() -> bool:
    """Return whether the key of the current request may unload models."""
    key = current_key.get()
    return key is None or key.admin


def check_access(model: str) -> None:
    """Raise `NotFound` if the key of the current request may not use this model."""
    if not may_use(model):
        message = f"The model {model!r:.200} does not exist, or your API key may not use it."
        raise NotFound(message, param="model", code="model_not_found")


def client_name() -> str:
    """Return the name of the key of the current request; "" without keys."""
    key = current_key.get()
    return "" if key is None else key.name


def tenant(salt: str | None, *, shared: bool) -> str:
    """Return a name for the requests with which the current one may share cached prefixes.

    These have the same salt and, unless `shared` is set, the same key.
    """
    owner = "" if shared else client_name()
    return owner if salt is None else f"{owner}\0{salt}"


def allowed_priority(priority: int) -> int:
    """Return the priority of a request, which is at most that of its key."""
    key = current_key.get()
    return priority if key is None else key.priority + min(0, priority)

"""ASGI middleware for `--api-key` and `--api-keys`.

The key is a Bearer token or Anthropic's `x-api-key`. Every path needs it, except those for
monitoring and the page that asks for the key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import ApiError, TooManyRequests, Unauthorized
from ..core.open_paths import is_open
from ..observability.metrics import MetricRegistry
from ..observability.request_record import KEY_NAME, current_record
from .accounts import ACCOUNT, Account, Accounts, check_path, current_key, is_counted

# Key of the scope of a request that the server makes itself, which needs no API key.
IN_PROCESS = "piecework.in_process"


class ApiKey:
    """Answers 401 to requests without a valid key, and 403 or 429 to what the key does not allow.

    `api_key` has no limits and is compared in constant time. `accounts` are those of `--api-keys`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        accounts: Accounts | None,
        metrics: MetricRegistry,
    ) -> None:
        self._app = app
        self._expected = None if api_key is None else api_key.encode()
        self._accounts = accounts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        keys, key, expected = _keys_of(scope), None, self._expected
        is_expected = expected is not None and any(
            hmac.compare_digest(given, expected) for given in keys
        )
        if IN_PROCESS not in scope and not is_expected:
            try:
                account = self._account(keys)
                send = self._begin(account, scope, send)
            except ApiError as error:
                self._metrics.count_error(error.type)
                await error.response(scope)(scope, receive, send)
                return
            key = account.key
        # Set even to None: the server may call itself within the context of a client's request.
        token = current_key.set(key)
        try:
            await self._app(scope, receive, send)
        finally:
            current_key.reset(token)

    def _account(self, keys: Sequence[bytes]) -> Account:
        for key in keys:
            if self._accounts is not None and (account := self._accounts.find(key)) is not None:
                return account
        raise Unauthorized(
            "The API key is missing or wrong: send the header `Authorization: Bearer KEY` with the "
            "server's key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _begin(self, account: Account, scope: Scope, send: Send) -> Send:
        """Count the request and add rate limit headers to its answer. Raises `ApiError`."""
        accounts, record = self._accounts, current_record.get()
        assert accounts is not None and record is not None, "requests with accounts are recorded"
        record.scope[KEY_NAME] = account.key.name
        check_path(account.key, scope["method"], scope["path"])
        if is_counted(scope["method"], scope["path"]):
            try:
                account.begin(record, accounts.now())
            except TooManyRequests as error:
                error.headers |= {
                    name.decode(): value.decode() for name, value in account.headers(accounts.now())
                }
                raise
            record.scope[ACCOUNT] = account

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                left = account.headers(accounts.now())
                message = {**message, "headers": [*message["headers"], *left]}
            await send(message)

        return send_on


def _keys_of(scope: Scope) -> list[bytes]:
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    bearer = key if scheme.lower() == b"bearer" else b""
    return [bearer.strip(), headers.get(b"x-api-key", b"").strip()]

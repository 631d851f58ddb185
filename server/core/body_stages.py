"""The stages of a request's body: parsed objects, the endpoint's checked copy, the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple


class _Watch(NamedTuple):
    checked: Callable[[], None]
    became_prompt: Callable[[], None]


_watch: ContextVar[_Watch | None] = ContextVar("body_stages", default=None)


@contextmanager
def watched(*, checked: Callable[[], None], became_prompt: Callable[[], None]) -> Iterator[None]:
    """Set the callbacks of the current request: its body is checked, or has become a prompt."""
    token = _watch.set(_Watch(checked, became_prompt))
    try:
        yield
    finally:
        _watch.reset(token)


def tells_checked(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an endpoint, which is called after its body was checked, to report that."""

    @wraps(endpoint)
    async def called(*arguments: Any, **values: Any) -> Any:
        if (watch := _watch.get()) is not None:
            watch.checked()
        return await endpoint(*arguments, **values)

    return called


def became_prompt() -> None:
    """Report that the body of the current request is now a prompt and not needed any more."""
    if (watch := _watch.get()) is not None:
        watch.became_prompt()

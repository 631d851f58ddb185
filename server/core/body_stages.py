"""What becomes of a request's body: objects, then an endpoint's checked copy, then a prompt."""

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
    """Call these when the body of the current request has been checked, and when it has become a
    prompt.
    """
    token = _watch.set(_Watch(checked, became_prompt))
    try:
        yield
    finally:
        _watch.reset(token)


def tells_checked(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The same endpoint. It is called once its body has been checked."""

    @wraps(endpoint)
    async def called(*arguments: Any, **values: Any) -> Any:
        if (watch := _watch.get()) is not None:
            watch.checked()
        return await endpoint(*arguments, **values)

    return called


def became_prompt() -> None:
    """Tell that the current request's body has become a prompt, and is not needed any more."""
    if (watch := _watch.get()) is not None:
        watch.became_prompt()

"""What the supervisor of an engine process knows of a request, whatever the engine makes."""

from __future__ import annotations

from typing import Any, Protocol

from ...runtime.engine.messages import FinishReason, ToEngine


class Unfinished(Protocol):
    """A request that the engine has and has not finished."""

    @property
    def suspect(self) -> bool:
        """Whether it may be what ended the engine process."""
        ...

    def goes_by(self, rid: str) -> bool:
        """Whether `rid` is its id, or that of the client's request which it is a part of."""
        ...

    def to_message(self) -> ToEngine:
        """What a new life of the engine needs to go on with it."""
        ...

    def begin_again(self) -> None:
        """A new life of the engine begins."""
        ...

    def take(self, output: Any) -> bool:
        """What the engine has made of it, for its consumer; whether it is over now."""
        ...

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Tell its consumer that it is over."""
        ...

"""What the supervisor of an engine process knows of a request, whatever the engine makes."""

from __future__ import annotations

from typing import Protocol

from ...runtime.engine.messages import FinishReason, ToEngine


class Unfinished(Protocol):
    """A request that the engine has and has not finished.

    `delivered`: the present life of the engine has shown that it outlives this request.
    """

    rid: str
    delivered: bool

    def goes_by(self, rid: str) -> bool:
        """Whether `rid` is its id, or that of the client's request which it is a part of."""
        ...

    def to_message(self) -> ToEngine:
        """What a new life of the engine needs to go on with it."""
        ...

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Tell its consumer that it is over."""
        ...

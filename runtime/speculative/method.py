"""The contract of a method that proposes tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..core.request import Request


class Guess(NamedTuple):
    """Tokens that may come next.

    `kind` groups guesses that are right about equally often: acceptance is counted by kind.
    """

    tokens: list[int]
    kind: str


class Proposer(Protocol):
    """Follows the text of one request and guesses how it continues."""

    def append(self, tokens: list[int]) -> None:
        """Add tokens that the request got."""
        ...

    def guess(self, most: int) -> Guess | None:
        """Return up to `most` tokens that may come next, or None."""
        ...


class Method(Protocol):
    """Makes the proposers of one kind.

    proposer = method.begin(request)     # its prompt is computed
    proposer.append(tokens)              # after each step
    guess = proposer.guess(16)
    method.end(request)
    """

    name: str

    def begin(self, request: Request) -> Proposer | None:
        """Return the proposer of a request, or None if the method does not suit it."""
        ...

    def end(self, request: Request) -> None:
        """Learn from the text of a request that has ended."""
        ...

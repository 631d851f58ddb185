"""The contract of a method that proposes tokens."""

from __future__ import annotations

from collections.abc import Mapping
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


class Drafter(Protocol):
    """A model that guesses. It computes the guesses of all requests together, when they are wanted.

    Attributes:
        steps: Most tokens that it guesses for a request.
    """

    name: str
    steps: int

    def draft(
        self, running: list[Request], counts: Mapping[Request, int]
    ) -> dict[Request, list[int]]:
        """Return guesses of up to `counts` tokens for these requests.

        Requests that are not `running` any more lose the memory that they had.
        """
        ...

    def seconds(self, requests: int) -> float:
        """Return the expected time that one token for each of so many requests takes."""
        ...

    def drop_finished(self) -> None:
        """Free the memory of requests that have ended."""
        ...

    def check(self) -> None:
        """Assert that no memory is leaked or used twice."""
        ...

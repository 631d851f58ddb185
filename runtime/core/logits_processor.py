"""The contract of a logits processor, and what it sees of a request and of its grammar.

N is the number of rows, V the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class GrammarState(Protocol):
    """The position of one output in its grammar."""

    @property
    def fault(self) -> str | None:
        """Why the output cannot continue, or None."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether no token can follow."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Append these tokens. A token that the grammar does not allow sets `fault`."""
        ...

    def takes(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> bool:
        """Whether these tokens may follow, after those of `ahead`."""
        ...

    def takes_only(self, tokens: Collection[int]) -> bool:
        """Whether no other token than these may follow."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow; empty if there is a choice."""
        ...

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow without ending the output."""
        ...

    def fill(self, bits: npt.NDArray[np.int32], ahead: Sequence[int] = ()) -> None:
        """Set the bit of each token that may follow, in bits [ceil(V / 32)], lowest bit first.

        `ahead` are tokens that precede it; `admits` has taken all of them.
        """
        ...


class Progress(Protocol):
    """What a processor sees of its request."""

    num_placeholders: int
    sampled_row: int  # Row of `sampled` that holds the token of the placeholder.

    @property
    def processors(self) -> Sequence[LogitsProcessor]: ...

    @property
    def ahead(self) -> Sequence[int]:
        """Proposals between the known tokens and the row. Empty for most rows."""
        ...

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """The output tokens that the host knows."""
        ...

    @property
    def num_output(self) -> int:
        """Number of output tokens before the row, placeholders and `ahead` included."""
        ...


P_co = TypeVar("P_co", covariant=True)
Rows = Sequence[tuple[int, P_co, Progress]]  # (row of the logits, its processor, its request)


class LogitsProcessor(Protocol):
    """One change that a request makes to its logits. Processors of one class run as one batch."""

    needs_last_token: ClassVar[bool]
    # Whether the host must know the last token. If so, steps of this request do not overlap.

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        """Return the processor of a request, or None if the request does not ask for it."""
        ...

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Rows[Self], sampled: torch.Tensor | None) -> None:
        """Change these rows of the logits [N, V] float32 in place.

        `sampled` [rows] int64 holds the tokens that the step in flight samples. Placeholders get
        their tokens from it.
        """
        ...


class MakesProcessors(Protocol):
    """Return the processors that a request asks for (`sampling.logits_processors`)."""

    def __call__(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Sequence[LogitsProcessor]: ...

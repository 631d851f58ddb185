"""A request as it will be after tokens that were proposed for it and are not verified yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .logits_processor import GrammarState, LogitsProcessor
from .request import Request
from .sampling_params import SamplingParams


class Ahead:
    """`request` after its first `count` proposals.

    A step that verifies proposals samples one more token for each of them. The sampler sees the row
    after the proposals of `ahead` as this object: same parameters, same seed, later position.
    """

    __slots__ = ("ahead", "num_tokens", "request")

    num_placeholders = 0
    sampled_row = 0

    def __init__(self, request: Request, count: int) -> None:
        self.request = request
        self.num_tokens = request.num_tokens + count
        self.ahead: Sequence[int] = request.proposals[:count]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def grammar(self) -> GrammarState | None:
        return self.request.grammar

    @property
    def processors(self) -> Sequence[LogitsProcessor]:
        return self.request.processors

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """The output tokens before `ahead`."""
        return self.request.output_tokens

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.request.num_prompt


Sampler = Request | Ahead


def with_proposals(request: Request) -> list[Sampler]:
    """Return the request, and the request after one, two and all of its proposals."""
    return [request, *(Ahead(request, count + 1) for count in range(len(request.proposals)))]

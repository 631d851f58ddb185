"""The counts of speculative decoding that a server has in its metrics."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from .client import Client, RequestFailed

_PREFIX = "vllm:spec_decode_num_"
_AGE = 0.3  # Seconds that metrics may be old.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """Tokens that steps verified, and those that were right."""

    proposed: int
    accepted: int

    def __sub__(self, other: Self) -> Proposals:
        return Proposals(
            proposed=self.proposed - other.proposed, accepted=self.accepted - other.accepted
        )

    def line(self) -> str:
        share = self.accepted / (self.proposed or 1)
        return (
            f"Speculation:          {self.accepted} of {self.proposed} proposed tokens accepted "
            f"({share:.0%})"
        )


async def read_proposals(client: Client) -> Proposals | None:
    """Read the counts from `/metrics`, by the names of vLLM, which Piecework has too.

    The counts are those of all requests that have been answered. Return None if the server has no
    such metrics.
    """
    if await _read(client) is None:
        return None
    await asyncio.sleep(_AGE)
    return await _read(client)


async def _read(client: Client) -> Proposals | None:
    with contextlib.suppress(RequestFailed, ValueError):
        text = (await client.get("/metrics")).decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        with contextlib.suppress(KeyError):
            return Proposals(
                proposed=round(totals[_PREFIX + "draft_tokens_total"]),
                accepted=round(totals[_PREFIX + "accepted_tokens_total"]),
            )
    return None

"""What the cache reads of a request, and the fields in which it keeps what the request holds."""

from __future__ import annotations

from typing import Protocol

from .block_pool import Block
from .radix import Node, Tokens


class Holder(Protocol):
    """A request, as the cache sees it. `runtime.core.request.Request` describes the fields."""

    namespace: bytes
    num_prompt: int
    num_tokens: int
    num_computed: int
    prompt_logprobs_due: bool
    keep: list[tuple[int, float]]
    client: str

    pages: list[int]
    shared_pages: int
    node: Node | None
    window: list[Block]
    window_begin: int
    state: Block | None
    state_source: int | None
    snapshot: Block | None
    saved: Block | None
    saved_at: int
    branch: int
    before: Block | None
    before_at: int

    @property
    def names(self) -> Tokens: ...

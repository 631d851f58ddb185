"""Token ids to text as they arrive: never half a character, stop strings held back, constant time per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer


class Decoded(NamedTuple):
    """`text` is new and final. `stop` is the stop string that was met, after which `consumed` of the pushed ids count."""

    text: str
    stop: str | None
    consumed: int


class Detokenizer:
    """Decodes one sequence."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, stop: Sequence[str], include_stop: bool, skip_special_tokens: bool
    ) -> None: ...

    def push(self, token_ids: Sequence[int]) -> Decoded:
        """Take new ids, give the text that is certain by now."""
        raise NotImplementedError

    def finish(self) -> str:
        """The text that was held back; the sequence has ended."""
        raise NotImplementedError

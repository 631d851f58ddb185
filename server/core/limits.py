"""What a request may ask for: prompts that fit the context, token ids that exist, bounded
amounts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .errors import InvalidRequest

MAX_SAMPLES = 128
"""Largest `n` and `best_of`."""
MAX_SEQUENCES = 4096
"""Most prompts of one request, each counted once for every sample."""
MAX_STOP_STRINGS = 64
"""OpenAI takes 4."""
MAX_STOP_LENGTH = 1024
"""Characters of one stop string: text that may become one is held back so far."""
MAX_STOP_CHARS = 8192
"""Characters of all stop strings of a sequence, which each new piece of its text is compared with.
"""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 2048
"""Each sample of a prompt takes all of them along."""
MAX_MESSAGES = 4096
MAX_TOKENIZED_CHARS = 2**20
"""Characters that one request has tokenised where no context length bounds them: each takes up to
200 bytes meanwhile.
"""
MAX_LOGPROBS = 2**19
"""Log-probabilities of generated tokens that one answer may hold, alternatives and samples counted:
each takes about 110 bytes, and up to 90 once it is written.
"""
MAX_KEPT_LOGPROBS = 2**20
"""All answers together."""
MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of prompts that one request is given, alternatives and samples counted: each
takes up to 200 bytes.
"""
MAX_STREAMED_PROMPT_LOGPROBS = 2**15
"""The same of a stream, whose chunks the event loop writes."""


class Limits(NamedTuple):
    """`context_length`: most tokens of prompt and completion together. Token ids lie in [0,
    vocab_size).
    """

    context_length: int
    vocab_size: int

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raises `InvalidRequest` for no tokens and for unknown ones."""
        if not ids:
            raise InvalidRequest(
                f"{param}: the text has no tokens; send some text.",
                param=param,
                code="invalid_value",
            )
        self.check_token_ids(ids, param)

    def check_token_ids(self, ids: Collection[int], param: str) -> None:
        """Raises `InvalidRequest` for ids that no token has."""
        if not ids:
            return
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self.vocab_size:
                message = (
                    f"{param}: there is no token {token_id!s:.20}; this model's token ids "
                    f"are 0 to {self.vocab_size - 1}."
                )
                raise InvalidRequest(message, param=param, code="invalid_token_id")

    def check_length(self, tokens: int, param: str) -> None:
        """Raises `InvalidRequest` for a prompt of `tokens` or more that leaves no room for a
        completion.
        """
        if tokens >= self.context_length:
            raise self._too_long(f"{param} has {tokens} or more", f"Shorten {param}", param)

    def completion_tokens(self, prompt_tokens: int, most: int, param: str) -> int:
        """Return how many tokens may be generated after a prompt that came as `param`: `most`, or
        what the context has left. Raises `InvalidRequest` where the prompt leaves no room.
        """
        left = self.context_length - prompt_tokens
        if left < min(most, 1):
            raise self._too_long(f"{param} has {prompt_tokens}", f"Shorten {param}", param)
        return min(most, left)

    def _too_long(self, what: str, remedy: str, param: str) -> InvalidRequest:
        message = (
            f"This model's maximum context length is {self.context_length} tokens, but "
            f"{what}. {remedy}."
        )
        return InvalidRequest(message, param=param, code="context_length_exceeded")


def check_text(characters: int, param: str) -> None:
    """Raises `InvalidRequest` for more text than one request has tokenised that need not fit the
    context.
    """
    if characters > MAX_TOKENIZED_CHARS:
        message = (
            f"{param}: {characters} characters are more than {MAX_TOKENIZED_CHARS}; send "
            "them in several requests."
        )
        raise InvalidRequest(message, param=param, code="text_too_long")

"""Limits of a request: the context length, valid token ids, and maximum counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .errors import InvalidRequest

MAX_SAMPLES = 128  # Maximum of `n` and `best_of`.
MAX_SEQUENCES = 4096  # Maximum of prompts times samples of a request.
MAX_STOP_STRINGS = 64  # OpenAI accepts 4.
# Characters of a stop string. Text that may become a stop string is held back.
MAX_STOP_LENGTH = 1024
# Characters of all stop strings of a sequence. Each new text is compared with all of them.
MAX_STOP_CHARS = 8192
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 2048  # Each sample of a prompt has a copy.
MAX_MESSAGES = 4096
# Characters that a request may have tokenised without a context length. Each takes up to 200 bytes
# meanwhile.
MAX_TOKENIZED_CHARS = 2**20
# Log-probabilities of generated tokens in one answer, with alternatives and samples. Each takes
# about 110 bytes, and up to 90 bytes in the written answer.
MAX_LOGPROBS = 2**19
MAX_KEPT_LOGPROBS = 2**20  # The same of all answers together.
# Log-probabilities of prompts in one answer, with alternatives and samples. Each takes up to 200
# bytes.
MAX_PROMPT_LOGPROBS = 2**18
MAX_STREAMED_PROMPT_LOGPROBS = 2**15  # Fewer in a stream, which the event loop writes.


class Limits(NamedTuple):
    """The limits of a model.

    `context_length` limits the tokens of prompt and completion together. Token ids are in
    [0, vocab_size).
    """

    context_length: int
    vocab_size: int

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` for an empty prompt or unknown token ids."""
        if not ids:
            raise InvalidRequest(
                f"{param}: the text has no tokens; send some text.",
                param=param,
                code="invalid_value",
            )
        self.check_token_ids(ids, param)

    def check_token_ids(self, ids: Collection[int], param: str) -> None:
        """Raise `InvalidRequest` for unknown token ids."""
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
        """Raise `InvalidRequest` if a prompt of `tokens` leaves no room for a completion."""
        if tokens >= self.context_length:
            raise self._too_long(f"{param} has {tokens} or more", f"Shorten {param}", param)

    def completion_tokens(self, prompt_tokens: int, most: int, param: str) -> int:
        """Return how many tokens may be generated: `most`, or what the context has left.

        Raises `InvalidRequest` for `param` if the prompt leaves no room.
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
    """Raise `InvalidRequest` for a text of more than `MAX_TOKENIZED_CHARS` characters."""
    if characters > MAX_TOKENIZED_CHARS:
        message = (
            f"{param}: {characters} characters are more than {MAX_TOKENIZED_CHARS}; send "
            "them in several requests."
        )
        raise InvalidRequest(message, param=param, code="text_too_long")

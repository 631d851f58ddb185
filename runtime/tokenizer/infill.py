"""Fill-in-the-middle prompts, for models that can write the text between two other texts.

>>> infill = find_infill(tokenizer)
>>> infill.prompt(tokenizer.encode(before), infill.encode(behind))

Each family of models marks the parts by its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer


class _Names(NamedTuple):
    """The tokens with which a family marks the three parts.

    If `suffix_first`, the prompt begins with the text after the gap. `end` are additional tokens
    that end the new text.
    """

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    end: str | None = None


_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    _Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, StableCode, Granite Code
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder: begin, hole, end
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>", end="▁<EOT>"),
    # Codestral, which begins with the suffix and has no third mark (mistral-common's FIM encoding)
    _Names("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
    # Seed-Coder
    _Names("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
)


# Tokens before the name of a repository and before the name of each of its files: Qwen2.5-Coder,
# StarCoder2.
_REPOSITORIES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))


class Infill(NamedTuple):
    """The format of one tokenizer.

    Attributes:
        repository: Tokens before the names of a repository and of a file, for models that read
            other files before the gap.
        stop_token_ids: Additional tokens that end the new text.
    """

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    stop_token_ids: list[int]
    repository: tuple[int, int] | None = None

    def prompt(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt.

        `before` the gap includes the tokens that the tokenizer adds to a text. `behind` is a result
        of `encode`.
        """
        bos = self.tokenizer.bos_token_id
        start = [bos] if bos is not None and list(before[:1]) == [bos] else []
        first = [self.prefix, *before[len(start) :]]
        second = [self.suffix, *behind]
        parts = [*second, *first] if self.suffix_first else [*first, *second]
        return [*start, *parts, *([] if self.middle is None else [self.middle])]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without the blank that SentencePiece puts before a text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.tokenizer.spelling is None or not self.tokenizer.spelling.strips_blank:
            return ids
        line = self.tokenizer.encode("\n", add_special_tokens=False)
        after_line = self.tokenizer.encode("\n" + text, add_special_tokens=False)
        return after_line[len(line) :] if after_line[: len(line)] == line else ids


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """Return the format whose tokens the tokenizer has, or None."""
    for names in _FAMILIES:
        prefix, suffix, middle, end = (
            None if name is None else tokenizer.backend.token_to_id(name)
            for name in (names.prefix, names.suffix, names.middle, names.end)
        )
        if prefix is None or suffix is None or (middle is None and names.middle is not None):
            continue
        stops = [] if end is None else [end]
        return Infill(
            tokenizer, prefix, suffix, middle, names.suffix_first, stops, _repository(tokenizer)
        )
    return None


def _repository(tokenizer: Tokenizer) -> tuple[int, int] | None:
    for names in _REPOSITORIES:
        repository, file = map(tokenizer.backend.token_to_id, names)
        if repository is not None and file is not None:
            return repository, file
    return None

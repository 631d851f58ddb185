"""The prompts of `piecework bench serving`, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from .datasets import GSM8K_STOPS, few_shot_prompts, load_gsm8k, load_sharegpt
from .pictures import picture_url

DATASETS = ("random", "shared-prefix", "gsm8k", "sharegpt-file")
PROMPT_KINDS = ("token-ids", "words")
CHARACTERS_PER_TOKEN = 4  # Estimates the tokens of a ShareGPT reply without a tokenizer.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by but not what all were we "
    "when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would "
    "make like him into time has look two more write go see number no way could people my than "
    "first water been call who now find "
    "long down day did get come made may part"
)
# Common words. After a space, each is one token in nearly every tokenizer.
WORDS = tuple(_WORDS.split())


class Prompt(NamedTuple):
    """A prompt, and the number of tokens to request. `images` are data URLs."""

    content: str | list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The kind of prompts. Lengths are in tokens.

    A random length is drawn evenly from L (1 - `random_range_ratio`) to L (1 +
    `random_range_ratio`), as in vLLM's benchmark. Random prompts are token ids, of exact length, or
    words of about one token each. `vocab_size` is needed for token ids. `output_len` replaces the
    output lengths of gsm8k and sharegpt-file.

    With `images`, a share of `image_share` of the prompts has so many random pictures of
    `image_size` x `image_size` pixels.
    """

    dataset: str = "random"
    kind: str = "token-ids"
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    prefix_len: int = 512
    num_prefixes: int = 1
    num_shots: int = 5
    output_len: int | None = None
    data_path: str | None = None
    vocab_size: int | None = None
    images: int = 0
    image_size: int = 512
    image_share: float = 1.0

    @property
    def needs_vocab_size(self) -> bool:
        return self.kind == "token-ids" and self.dataset in ("random", "shared-prefix")


def make_prompts(workload: Workload, count: int, rng: random.Random) -> list[Prompt]:
    """Return `count` prompts. Raises `ValueError` if a file is missing or malformed."""
    prompts = _texts(workload, count, rng)
    if not workload.images:
        return prompts
    # Spread evenly, so that every part of the load has the same share.
    return [
        prompt._replace(images=pictures(workload, rng))
        if int((place + 1) * workload.image_share) > int(place * workload.image_share)
        else prompt
        for place, prompt in enumerate(prompts)
    ]


def pictures(workload: Workload, rng: random.Random) -> tuple[str, ...]:
    """Return new pictures for a prompt."""
    return tuple(picture_url(workload.image_size, rng) for _ in range(workload.images))


def _texts(workload: Workload, count: int, rng: random.Random) -> list[Prompt]:
    match workload.dataset:
        case "random":
            return _random_prompts(workload, [[]], count, rng)
        case "shared-prefix":
            prefixes = [
                _symbols(workload, workload.prefix_len, rng) for _ in range(workload.num_prefixes)
            ]
            return _random_prompts(workload, prefixes, count, rng)
        case "gsm8k":
            texts = _gsm8k_texts(workload)
            return [
                Prompt(next(texts), workload.output_len or 512, GSM8K_STOPS) for _ in range(count)
            ]
        case "sharegpt-file":
            return _sharegpt_prompts(workload, count, rng)
    raise AssertionError(workload.dataset)


def _random_prompts(
    workload: Workload, prefixes: list[list[int]], count: int, rng: random.Random
) -> list[Prompt]:
    prompts = []
    for index in range(count):
        length = _draw_length(workload.random_input_len, workload.random_range_ratio, rng)
        symbols = prefixes[index % len(prefixes)] + _symbols(workload, length, rng)
        content = (
            symbols
            if workload.kind == "token-ids"
            else " ".join(WORDS[symbol] for symbol in symbols)
        )
        prompts.append(
            Prompt(
                content, _draw_length(workload.random_output_len, workload.random_range_ratio, rng)
            )
        )
    return prompts


def _draw_length(length: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _symbols(workload: Workload, length: int, rng: random.Random) -> list[int]:
    """Return random token ids, or indices of words.

    Ids keep away from both ends of the vocabulary, where special and unused tokens are.
    """
    if workload.kind == "words":
        return rng.choices(range(len(WORDS)), k=length)
    assert workload.vocab_size is not None
    margin = workload.vocab_size // 20
    return rng.choices(range(margin, workload.vocab_size - margin), k=length)


def _gsm8k_texts(workload: Workload) -> Iterator[str]:
    questions = load_gsm8k(workload.data_path)
    return cycle(few_shot_prompts(questions, workload.num_shots, len(questions)))


def _sharegpt_prompts(workload: Workload, count: int, rng: random.Random) -> list[Prompt]:
    conversations = load_sharegpt(workload.data_path)
    rng.shuffle(conversations)
    chosen = cycle(conversations)
    prompts = []
    for _ in range(count):
        prompt, reply = next(chosen)
        prompts.append(
            Prompt(prompt, workload.output_len or max(1, len(reply) // CHARACTERS_PER_TOKEN))
        )
    return prompts

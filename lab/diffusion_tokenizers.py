"""Small tokenizers for the tiny pipelines, of CLIP's, T5's and Qwen2's kinds.

Their vocabularies are bytes or letters and the words of a few sentences, merged by a fixed rule.
The trainers of the libraries break ties by the order of a hash table, so their files differ between
runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

VOCAB_SIZE = 1024  # Maximum vocabulary; the embeddings of the text encoders have as many rows.
CLIP_LENGTH = 77
T5_LENGTH = 512
QWEN_LENGTH = 131072
_EXTRA_IDS = 8
_RARE = -12.0  # Log-probability of a single letter, far below that of any word.
_TEXT = """\
system
Describe the image by detailing the color, shape, size, texture, quantity, text, \
spatial relationships of the objects and background:
user
assistant
a photo of a red fox in the snow, a watercolour of a lighthouse at dusk, \
an oil painting of two sailing boats on a calm sea
a cat holds a sign that says hello world, a robot paints a portrait, \
blurry, low quality, bright colours, overexposed
the camera pans slowly over mountains while clouds drift by, \
cinematic light, highly detailed studio photograph
"""
_END = "</w>"


def clip_tokenizer() -> Any:
    """Return a lower-case BPE tokenizer whose words end in `</w>`, with at most 77 tokens."""
    letters = sorted(ByteLevel.alphabet())
    words = [[*word[:-1], word[-1] + _END] for word in _words(_TEXT.lower())]
    vocab, merges = _merged([*letters, *(letter + _END for letter in letters)], words)
    # Text models expect the largest id at the end.
    special = {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab | special, merges=merges, model_max_length=CLIP_LENGTH)


def t5_tokenizer() -> Any:
    """Return a unigram tokenizer with SentencePiece's spelling and `</s>` at the end."""
    counts = Counter(_words(_TEXT))
    total = sum(counts.values())
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [(letter, _RARE) for letter in ("▁", *map(chr, range(33, 127)))]
    pieces = [(f"▁{word}", math.log(count / total)) for word, count in sorted(counts.items())]
    return T5Tokenizer(
        vocab=[*special, *letters, *pieces], extra_ids=_EXTRA_IDS, model_max_length=T5_LENGTH
    )


def qwen_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer with the marks of a chat."""
    # ByteLevel writes a space as this letter.
    words = [list(word) for plain in _words(_TEXT) for word in (plain, f"Ġ{plain}")]
    vocab, merges = _merged(["<|endoftext|>", *sorted(ByteLevel.alphabet())], words)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=QWEN_LENGTH)
    tokenizer.add_tokens(
        [AddedToken(marker, special=True) for marker in ("<|im_start|>", "<|im_end|>")]
    )
    return tokenizer


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _merged(
    alphabet: Iterable[str], words: Iterable[list[str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a BPE vocabulary and its merges. Each word is merged letter by letter from its
    beginning, while there is room.
    """
    vocab = {token: number for number, token in enumerate(dict.fromkeys(alphabet))}
    merges: dict[tuple[str, str], None] = {}
    for letters in words:
        beginning = letters[0]
        for letter in letters[1:]:
            if len(vocab) >= VOCAB_SIZE - 8:
                return vocab, list(merges)
            merges.setdefault((beginning, letter))
            beginning += letter
            vocab.setdefault(beginning, len(vocab))
    return vocab, list(merges)

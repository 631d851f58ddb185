"""A small byte-level BPE tokenizer with a ChatML template, trained on the spot."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if shout is defined and shout %}{{ raise_exception('no shouting') }}{% endif %}"
)
CORPUS = [
    "Hello there, old friend! The weather is fine today.",
    "The quick brown fox jumps over the lazy dog.",
    "naïve café 東京 🦊",
] * 4
BOS, START, EOS = "<s>", "<|im_start|>", "<|im_end|>"


def toy_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """About 330 tokens, of which `<s>` (0), `<|im_start|>` (1) and `<|im_end|>` (2, ends a text)
    are special.
    """
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(
        TokenizerData(
            backend=_backend(),
            special_tokens={"bos_token": BOS},
            eos_token_ids=[2],
            chat_templates=templates,
        )
    )


@cache
def _backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[BOS, START, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend

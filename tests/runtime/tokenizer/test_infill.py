"""Fill-in-the-middle prompts have their parts in the order that each family learned."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.infill import find_infill
from piecework.runtime.tokenizer.tokenizer import Tokenizer

BOS = "<s>"
FAMILIES = {
    "qwen": ["<|fim_prefix|>", "ab", "<|fim_suffix|>", "cd", "<|fim_middle|>"],
    "starcoder": ["<fim_prefix>", "ab", "<fim_suffix>", "cd", "<fim_middle>"],
    "deepseek": ["<｜fim▁begin｜>", "ab", "<｜fim▁hole｜>", "cd", "<｜fim▁end｜>"],
    "codestral": ["[SUFFIX]", "cd", "[PREFIX]", "ab"],
    "seed": ["<[fim-suffix]>", "cd", "<[fim-prefix]>", "ab", "<[fim-middle]>"],
}


def byte_level(names: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate("abcd")}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, *names])
    return Tokenizer(
        TokenizerData(
            backend=backend, special_tokens={"bos_token": BOS}, eos_token_ids=[], chat_templates={}
        )
    )


@pytest.mark.parametrize("parts", FAMILIES.values(), ids=FAMILIES)
def test_each_familys_order(parts: list[str]) -> None:
    tokenizer = byte_level([part for part in parts if len(part) > 2])
    infill = find_infill(tokenizer)
    assert infill is not None
    before = [tokenizer.bos_token_id or 0, *tokenizer.encode("ab")]
    ids = infill.prompt(before, infill.encode("cd"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == BOS + "".join(parts)


def test_a_suffix_has_no_blank_that_nobody_wrote() -> None:
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    letters = ["<unk>", "▁", *"abcd", "▁c", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {letter: at for at, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "c")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(names)
    tokenizer = Tokenizer(
        TokenizerData(backend=backend, special_tokens={}, eos_token_ids=[], chat_templates={})
    )
    infill = find_infill(tokenizer)
    assert infill is not None
    assert [backend.id_to_token(each) for each in infill.encode("cd")] == ["c", "d"]
    assert [backend.id_to_token(each) for each in infill.encode(" cd")] == ["▁c", "d"]
    assert infill.stop_token_ids == [backend.token_to_id("▁<EOT>")]


def test_a_tokenizer_without_such_tokens_has_no_way() -> None:
    assert find_infill(byte_level(["<fim_prefix>", "<fim_suffix>"])) is None

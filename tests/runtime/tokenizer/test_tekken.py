"""Tokenizers of tekken.json files: byte pairs are merged by rank."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

_WORDS = [b"th", b"he", b"the", b" t", b" th", b" the", b"an", b"ban", b"ana", b"\xc3\xa9"]
_RANKS = {
    piece: rank for rank, piece in enumerate([*(bytes([b]) for b in range(256)), *_WORDS, b"cut"])
}


def write_tekken(folder: Path) -> None:
    """A file with one byte string more than its vocabulary holds."""
    content = {
        "config": {
            "pattern": r" ?[^ ]+| +",
            "default_num_special_tokens": 30,
            "default_vocab_size": 30 + len(_RANKS) - 1,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode()}
            for piece, rank in _RANKS.items()
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))


@cache
def tekken() -> Tokenizer:
    with TemporaryDirectory() as folder:
        write_tekken(Path(folder))
        return load_tokenizer(folder)


def merged(piece: bytes) -> list[int]:
    """Ids by the definition of byte-pair encoding by rank."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        unions = [
            (rank, index)
            for index in range(len(parts) - 1)
            if (rank := _RANKS.get(parts[index] + parts[index + 1], 10**9)) < len(_RANKS) - 1
        ]
        if not unions:
            return [30 + _RANKS[part] for part in parts]
        index = min(unions)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@given(text=st.lists(st.sampled_from([*"theban é日😀", " the", "cut", "\n"])).map("".join))
def test_a_text_is_merged_by_rank_and_given_back(text: str) -> None:
    pieces = re.findall(" ?[^ ]+| +", text)
    ids = [token_id for piece in pieces for token_id in merged(piece.encode())]
    assert tekken().encode(text) == [1, *ids]
    assert tekken().decode([1, *ids]) == text


def test_special_tokens_come_first_and_have_their_names() -> None:
    tokenizer = tekken()
    assert tokenizer.encode("[INST]<SPECIAL_29>", add_special_tokens=False) == [3, 29]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, [2])
    assert tokenizer.special_token_ids == set(range(30))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match=r"tekken\.json.*--tokenizer-path"):
        load_tokenizer(str(tmp_path))

"""The tokenizer of a tekken.json, as Mistral publishes it beside its weights.

The file lists byte strings by rank, special tokens and the expression that cuts a text
(mistral-common, tokens/tokenizers/tekken.py). Ids of byte strings follow those of special tokens.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from ..files.folder import read_json
from .token_bytes import byte_alphabet

# Special tokens of files that list none, by id.
_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer and its special tokens by name. Raises `ValueError` for a damaged file."""
    content = read_json(path)
    try:
        return _build(content)
    except Exception as error:  # tokenizers raises no narrower class
        raise ValueError(
            f"{path} is no tekken tokenizer ({error!r}): download it again, or name another with "
            "--tokenizer-path"
        ) from error


def _build(content: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    config = content["config"]
    reserved: int = config["default_num_special_tokens"]
    special = [f"<SPECIAL_{index}>" for index in range(reserved)]
    listed = content.get("special_tokens") or [
        {"rank": rank, "token_str": token} for rank, token in enumerate(_SPECIAL[:reserved])
    ]
    for entry in listed:
        special[entry["rank"]] = entry["token_str"]
    spelled = byte_alphabet()
    count = config["default_vocab_size"] - reserved
    entries = sorted(content["vocab"], key=lambda entry: entry["rank"])[:count]
    pieces = [
        "".join(spelled[byte] for byte in base64.b64decode(entry["token_bytes"]))
        for entry in entries
    ]
    vocabulary = {piece: index for index, piece in enumerate([*special, *pieces])}
    # Neighbours are merged if their union is a token, the one of the lowest rank first.
    ranked = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        pair
        for piece in pieces
        for _, pair in sorted(
            ((ranked[piece[:cut]], ranked[piece[cut:]]), (piece[:cut], piece[cut:]))
            for cut in range(1, len(piece))
            if piece[:cut] in ranked and piece[cut:] in ranked
        )
    ]
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = Sequence(
        [
            Split(Regex(config["pattern"]), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    named = {name: token for name, token in _NAMES.items() if token in special}
    if bos := named.get("bos_token"):
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, special.index(bos))]
        )
    return backend, named

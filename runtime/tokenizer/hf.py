"""The tokenizer of a Hugging Face folder: tokenizer.json and the files that add to it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from ..files.folder import check_pointer, config_eos_token_ids, read_json
from .chat_template import DEFAULT
from .data import TokenizerData
from .tekken import read_tekken

logger = logging.getLogger(__name__)

_SPECIAL_TOKENS = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_OTHER_FORMATS = ("tekken.json", "tokenizer.model", "vocab.json", "tiktoken.model", "spiece.model")
_CONVERSION_TIMEOUT = 300  # seconds

# Run in a process of its own, because AutoTokenizer imports torch. Writes a file, because libraries
# may print.
_CONVERT = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
special = tokenizer.special_tokens_map.items()
special = {name: str(token) for name, token in special if isinstance(token, str)}
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump({"tokenizer": tokenizer.backend_tokenizer.to_str(), "special_tokens": special}, file)
"""


def read_hf_tokenizer(path: Path) -> TokenizerData:
    """Read the tokenizer of a folder, or a tokenizer.json and the files beside it.

    Only tokenizer.json decides which tokens are added around a text. As in transformers 5, flags
    such as `add_bos_token` in tokenizer_config.json do not change that. Raise `ValueError` with a
    remedy.
    """
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() or path.name == "tekken.json" else path
    config = {
        **_read_object(folder / "special_tokens_map.json"),
        **_read_object(folder / "tokenizer_config.json"),
    }
    special_tokens = {
        name: token for name in _SPECIAL_TOKENS if (token := _content(config.get(name))) is not None
    }
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no narrower class
            check_pointer(file)
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        _add_tokens(backend, config, special_tokens)
    elif (tekken := path if path.name == "tekken.json" else folder / "tekken.json").is_file():
        check_pointer(tekken)
        backend, special_tokens = read_tekken(tekken)
    else:
        backend, special_tokens = _convert(folder)
    backend.no_truncation()
    backend.no_padding()
    eos = special_tokens.get("eos_token")
    eos_token_id = backend.token_to_id(eos) if eos is not None else None
    own = [] if eos_token_id is None else [eos_token_id]
    # The templates of tokenizer_config.json and of files. Files override the former.
    listed = config.get("chat_template")
    if isinstance(listed, str):
        listed = [{"name": DEFAULT, "template": listed}]
    templates = {entry["name"]: entry["template"] for entry in listed or []}
    files = [(DEFAULT, folder / "chat_template.jinja")]
    files += [
        (path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    ]
    templates.update(
        {name: path.read_text(encoding="utf-8") for name, path in files if path.is_file()}
    )
    return TokenizerData(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=list(dict.fromkeys([*own, *config_eos_token_ids(folder)])),
        chat_templates=templates,
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if there is no file."""
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _content(token: object) -> str | None:
    """Return a special token's text, which files store plain or as {"content": ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add the tokens that tokenizer_config.json adds or changes, and make special tokens special
    that are plain in tokenizer.json.
    """
    known = {
        token.content: token.__getstate__() for token in backend.get_added_tokens_decoder().values()
    }
    listed: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(**entry)
        if known.get(token.content) != token.__getstate__():
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    names = [*special_tokens.values()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        found = map(_content, extra.values() if isinstance(extra, dict) else extra)
        names += [content for content in found if content is not None]
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    missing = [name for name in dict.fromkeys(names) if name not in special]
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in missing]
    )


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert an older format with transformers, which takes some seconds."""
    if not any((folder / name).is_file() for name in _OTHER_FORMATS):
        raise ValueError(
            f"{folder} has no tokenizer (tokenizer.json, {', '.join(_OTHER_FORMATS)}); name one "
            "with --tokenizer-path"
        )
    for name in _OTHER_FORMATS:
        check_pointer(folder / name)
    logger.info("%s has no tokenizer.json: transformers converts its tokenizer", folder)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "tokenizer")
        command = [sys.executable, "-c", _CONVERT, str(folder), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERSION_TIMEOUT)
        if done.returncode != 0:
            reason = done.stderr.strip().rpartition("\n")[2]
            remedy = (
                "name another with --tokenizer-path"
                if find_spec("sentencepiece")
                else "pip install sentencepiece protobuf"
            )
            raise ValueError(
                f"transformers cannot convert the tokenizer of {folder} ({reason}); {remedy}"
            )
        converted = json.loads(target.read_text(encoding="utf-8"))
    return tokenizers.Tokenizer.from_str(converted["tokenizer"]), converted["special_tokens"]

"""Checks a model's files by names, sizes and headers. Reads no weights and does not need torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_NUMBERS = ("F64", "F32", "F16", "BF16")
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32", "I64", "BOOL")
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_LARGEST_POINTER = 1024
_LARGEST_HEADER = 100_000_000  # Bytes, the limit of the safetensors library.
_SHOWN = 3


class Header(NamedTuple):
    """The header of one tensor in a safetensors file.

    `dtype` is the format's name, such as BF16.
    """

    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder.

    Raise `ValueError` if files are missing, or if there are none. The error says what is there
    instead.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is broken ({error}); download the model again") from None
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(
                f"{index} is broken: it names {_some(outside)}, outside of the folder; download "
                "the model again"
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            lacking = f"{_some(missing)} of {len(names)} files"
            raise ValueError(
                f"{folder} lacks {lacking} that its index names: the download did not end; "
                "download the model again"
            )
        files = [folder / name for name in names]
    else:
        # Some folders hold a second copy of the weights under another name.
        named = sorted(
            path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_")
        )
        files = [folder / _WHOLE] if (folder / _WHOLE).is_file() else named
    if not files:
        raise no_model(folder, ".safetensors files")
    return files


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise `ValueError` if it is not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from None


def check_pointer(path: Path) -> None:
    """Raise `ValueError` if the file is a git-lfs pointer instead of the large file."""
    if (
        path.is_file()
        and path.stat().st_size <= _LARGEST_POINTER
        and path.read_bytes().startswith(_POINTER)
    ):
        raise ValueError(
            f"{path} is a git-lfs pointer and not the file itself; run: git -C {path.parent} lfs "
            "pull"
        )


def read_header(path: Path, *, quantized: bool = False) -> dict[str, Header]:
    """Return the headers of the tensors in a .safetensors file, by name.

    Raise `ValueError` if the file is cut off, or if a dtype is not one of `_NUMBERS` (or of
    `_QUANTIZED`, if the model is `quantized`).

    Format (https://huggingface.co/docs/safetensors): the header's length as 8 bytes, the header in
    JSON, the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8)) if size >= 8 else (0,)
        text = file.read(length) if length <= min(size - 8, _LARGEST_HEADER) else b""
    try:
        entries: dict[str, Any] = {
            name: entry for name, entry in json.loads(text).items() if name != "__metadata__"
        }
        found = {
            name: Header(str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in entries.items()
        }
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        check_pointer(path)
        raise ValueError(
            f"{path} is cut off or broken: it does not begin with a header; download it again"
        ) from None
    if end != size:
        raise ValueError(
            f"{path} is cut off or broken: it has {size:,} of {end:,} bytes; download it again"
        )
    for name, header in found.items():
        if quantized and header.dtype not in (*_NUMBERS, *_QUANTIZED):
            raise ValueError(
                f"{path} stores {name} as {header.dtype}, which is not supported; supported: "
                f"{', '.join((*_NUMBERS, *_QUANTIZED))}; take another checkpoint"
            )
        if not quantized and header.dtype not in _NUMBERS:
            kind = "float8" if header.dtype.startswith("F8") else header.dtype
            raise ValueError(
                f"{path} stores {name} as {kind}, but config.json has no quantization_config to "
                "say how it is scaled; take the checkpoint in bfloat16, or a .gguf file"
            )
    return found


def no_model(folder: Path, lacking: str) -> ValueError:
    """Return the error for a folder without a model. It says what is missing and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    others = [path.name for pattern in _OTHER_WEIGHTS for path in sorted(folder.glob(pattern))]
    if _ADAPTER in names:
        try:
            base = read_json(folder / _ADAPTER)["base_model_name_or_path"]
        except (ValueError, KeyError, TypeError):
            base = None
        made_for = f" for {base}" if isinstance(base, str) and base else ""
        fault = (
            f"holds a LoRA adapter{made_for}, no model; merge it into the model that it was made "
            "for, and serve that"
        )
    elif not names:
        fault = "is empty"
    elif gguf := [name for name in names if name.endswith(".gguf")]:
        fault = f"is a folder with {_some(gguf)}; name the file to serve: {folder / gguf[0]}"
    elif others and lacking != "config.json":
        fault = (
            f"has its weights in {_some(others)}, whose format can hold code and is not read; take "
            "a copy with .safetensors files, or write one with transformers: "
            "save_pretrained(FOLDER)"
        )
    else:
        fault = (
            f"has no {lacking}; a model is a folder with config.json and .safetensors files, or a "
            ".gguf file"
        )
    return ValueError(f"{folder} {fault}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def config_eos_token_ids(folder: Path) -> list[int]:
    """Return the tokens that end a text, from generation_config.json and config.json.

    Either file may have one id or a list.
    """
    ids: list[object] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        content = read_json(path) if path.is_file() else None
        for part in (content, content.get("text_config")) if isinstance(content, dict) else ():
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            ids += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))

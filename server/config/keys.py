"""Reads the file of `--api-keys`, which has a hash of each key and its limits.

The file is YAML (a list, or a list under `keys:`), or one JSON object per line:

    - name: team-a
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      models: [qwen]
      requests_per_minute: 60
      tokens_per_minute: 100000
      concurrency: 4

`piecework key NAME` makes an entry.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

logger = logging.getLogger(__name__)

# Maximum bytes of a file. JSON is read a hundred times as fast as YAML.
_MAX_YAML_BYTES = 2**20
_MAX_JSON_BYTES = 2**26
_MAX_LIMIT = 2**31 - 1
_NAME = re.compile(r"[\w.@:+-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. A limit of None means no limit. Raises `ValueError`.

    `models` are those that the key may use. `priority` is added to its requests. With `admin`, the
    key may use every endpoint.
    """

    name: str
    sha256: str
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    priority: int = 0
    admin: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError("name must be 1 to 64 letters, digits or .@:+-_")
        if not isinstance(self.sha256, str) or not _HASH.fullmatch(self.sha256):
            raise ValueError("sha256 must be the 64 small hexadecimal digits of the key's SHA-256")
        if self.sha256 == hash_of(b""):
            raise ValueError("sha256 is that of an empty key, which everybody has")
        for limit in ("requests_per_minute", "tokens_per_minute", "concurrency"):
            value = getattr(self, limit)
            if value is not None and not (type(value) is int and 1 <= value <= _MAX_LIMIT):
                raise ValueError(f"{limit} must be a whole number from 1 to {_MAX_LIMIT}")
        if type(self.priority) is not int or abs(self.priority) > 10**6:
            raise ValueError("priority must be a whole number of at most a million")
        if type(self.admin) is not bool:
            raise ValueError("admin must be true or false")
        if self.models is not None:
            if not isinstance(self.models, (list, tuple)) or not all(
                isinstance(name, str) for name in self.models
            ):
                raise ValueError("models must be a list of names")
            object.__setattr__(self, "models", tuple(self.models))


def hash_of(key: bytes) -> str:
    """Return the hash of a key. Keys are long and random, so a plain SHA-256 cannot be inverted."""
    return hashlib.sha256(key).hexdigest()


def read_keys(path: str) -> dict[str, Key]:
    """Return the keys of a file by their hashes. Raises `ValueError` for the first invalid key."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_JSON_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"--api-keys {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-keys {path} is not text in UTF-8") from None
    is_json = text.lstrip().startswith("{")
    if len(content) > (_MAX_JSON_BYTES if is_json else _MAX_YAML_BYTES):
        raise ValueError(
            f"--api-keys {path} is too large: at most {_MAX_JSON_BYTES >> 20} MiB of JSON lines, "
            f"or {_MAX_YAML_BYTES >> 20} MiB of YAML"
        )
    found: dict[str, Key] = {}
    names: set[str] = set()
    for where, entry in _json_lines(path, text) if is_json else _yaml_entries(path, text):
        key = _key(where, entry)
        if key.name in names or key.sha256 in found:
            raise ValueError(f"{where}: {key.name} has the name or the hash of a key before it")
        names.add(key.name)
        found[key.sha256] = key
    if not found:
        raise ValueError(
            f"--api-keys {path} has no keys, so no client could send requests; add a key"
        )
    return found


def _json_lines(path: str, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{path}:{number}: this line is no JSON object") from None


def _yaml_entries(path: str, text: str) -> Iterator[tuple[str, Any]]:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: {error.problem or error.context}") from None
    except Exception:  # PyYAML also raises the errors of int, datetime and dict
        raise ValueError(f"--api-keys {path} is no YAML") from None
    if isinstance(content, dict) and content.keys() == {"keys"}:
        content = content["keys"]
    if not isinstance(content, list):
        raise ValueError(f"--api-keys {path} holds no list of keys; each begins with `- name: `")
    for number, entry in enumerate(content, 1):
        yield f"{path}: key {number}", entry


def _key(where: str, entry: Any) -> Key:
    known = [item.name for item in fields(Key)]
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: a key is a mapping of name, sha256 and its limits")
    for name in entry:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{where}: unknown field {str(name)[:40]!r}; {hint}")
    missing = [name for name in ("name", "sha256") if name not in entry]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing; `piecework key NAME` makes a line")
    try:
        return Key(**entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

"""Reads the server's API key from a file or the environment, and hides it from child processes."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

VARIABLE = "PIECEWORK_API_KEY"
_MAX_BYTES = 16_384  # A key must fit into one header.


def read_api_key(path: str) -> str:
    """Return the key in a file, without surrounding white space. Raises `ValueError`."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning(
            "--api-key-file %s can be read by every user of this machine; chmod o-r it", path
        )
    try:
        return checked_key(content.decode(), f"--api-key-file {path}")
    except UnicodeDecodeError:
        raise ValueError(
            f"--api-key-file {path} is not UTF-8 text; write the key into the file, in one line"
        ) from None


def take_api_key(environment: MutableMapping[str, str]) -> str | None:
    """Return the key in PIECEWORK_API_KEY and remove the variable, so child processes lack it.

    Raises `ValueError`.
    """
    found = environment.pop(VARIABLE, None)
    return None if found is None else checked_key(found, VARIABLE)


def checked_key(key: str, source: str) -> str:
    """Return the key without surrounding white space.

    Raises `ValueError` for a key that clients cannot send. `source` names its origin in errors.
    """
    key = key.strip()
    if not key:
        raise ValueError(f"{source} is empty; put a key there, or omit it to serve without a key")
    if not key.isprintable() or len(key.encode()) > _MAX_BYTES:
        raise ValueError(
            f"{source} holds more than one line, control characters or over {_MAX_BYTES} bytes; a "
            "key is one line of text"
        )
    return key

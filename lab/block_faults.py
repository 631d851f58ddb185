"""Kills processes that write blocks of the KV cache into a folder, and damages its files.

    python -m piecework.lab.block_faults --kills 500 --damages 200

Each writer appends blocks, whose content follows from their keys, until it is killed. Then one or
more files are cut or changed. After each kill and each damage the folder is opened again and every
block that it names is read. The exit code is 1 if a block has a wrong content, or if opening fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

from ..runtime.tiers.segments import Segments
from ..runtime.tiers.store import KEY_BYTES

_FOLDER_BYTES = 64 << 20
_KEYS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.block_faults", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", metavar="FOLDER", help="write blocks until killed")
    given = parser.parse_args()
    if given.write is not None:
        return _write(Path(given.write), random.Random(given.seed))
    logging.disable()  # Damaged files are expected.
    chance, wrong, missed, read = random.Random(given.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(given.kills):
            _kill_a_writer(folder, number, chance)
            found = _check(folder)
            wrong, read = wrong + found[0], read + found[1]
        for _ in range(given.damages):
            _damage(folder, chance)
            found = _check(folder)
            wrong, read, missed = wrong + found[0], read + found[1], missed + found[2]
    print(
        f"{given.kills} kills, {given.damages} damages: {read} blocks read, {missed} damaged ones "
        f"found missing, {wrong} wrong"
    )
    return 1 if wrong or not read else 0


def _kill_a_writer(folder: Path, number: int, chance: random.Random) -> None:
    command = [sys.executable, "-m", "piecework.lab.block_faults", "--write", str(folder)]
    writer = subprocess.Popen([*command, "--seed", str(number)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline(), "the writer did not start"
    time.sleep(chance.random() * 0.03)
    writer.kill()
    writer.communicate()


def _write(folder: Path, chance: random.Random) -> int:
    store = Segments(folder, _FOLDER_BYTES)
    print("writing", flush=True)
    while True:
        number = chance.randrange(_KEYS)
        store.put(_key(number), memoryview(_content(number)))


def _check(folder: Path) -> tuple[int, int, int]:
    """Return how many blocks are wrong, right, and named but missing."""
    store, wrong, right, missing = Segments(folder, _FOLDER_BYTES), 0, 0, 0
    for number in range(_KEYS):
        if not (size := store.size_of(_key(number))):
            continue
        content = bytearray(size)
        if not store.get(_key(number), memoryview(content)):
            missing += 1
        elif content == _content(number):
            right += 1
        else:
            wrong += 1
    store.close()
    return wrong, right, missing


def _damage(folder: Path, chance: random.Random) -> None:
    """Cut a file at a random place, or change one of its bits."""
    path = chance.choice(sorted(folder.iterdir()))
    size = path.stat().st_size
    if not size:
        return
    if chance.random() < 0.5:
        os.truncate(path, chance.randrange(size))
        return
    with open(path, "r+b") as file:
        file.seek(place := chance.randrange(size))
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _key(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()


def _content(number: int) -> bytes:
    """Return 1 to 64 KiB."""
    return _key(number) * (52 + number * 997 % 3277)


if __name__ == "__main__":
    sys.exit(main())

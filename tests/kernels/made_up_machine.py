"""A machine that the kernel's files and masks tell of, made up for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Machine:
    """A file system with what Linux tells under `root`, and a process's affinity mask."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def groups(self, own: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", own)
        self.write(
            "proc/self/mountinfo",
            "\n".join(["22 1 254:0 / / rw,relatime - ext4 /dev/vda rw", *mounts]),
        )

    def cpus(
        self, siblings: list[str], allowed: set[int] | None = None, name: str = "core_cpus_list"
    ) -> None:
        """`siblings`: for each CPU, those of its core; "" where nothing tells."""
        for cpu, text in enumerate(siblings):
            if text:
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", text)
        self._monkeypatch.setattr(os, "cpu_count", lambda: len(siblings))
        self._monkeypatch.setattr(
            os, "sched_getaffinity", lambda pid: allowed or set(range(len(siblings))), raising=False
        )

"""Watches a server under attack from a separate process: the time of `/health`, and memory.

Two things are subtracted: time in which other programs used the core of the server's event loop,
and memory of the KV cache, which was reserved at the start but is counted at its first use.

Run as `python -m piecework.lab.attack.watch URL PID`. It answers each line on standard input with a
line of JSON: `Seen` since the previous line. With PID 0 memory is not watched.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from .core_waits import CoreWaits, waited

POLL_SECONDS = 0.05
_CACHE_SECONDS = 0.5  # Seconds between two readings of the KV cache's use.
_TIMEOUT = 180.0
_MIB = 2**20
# Memory samples that are kept. Beyond that, every second sample is dropped, except the first and
# the largest.
_MOST_SAMPLES = 4000


@dataclass(slots=True)
class Seen:
    """What was seen of a server in an interval.

    `memory` has samples in MiB: (web process, its children without the used pages of the KV cache).
    `worst_wait` is the time of the slowest `/health` in seconds, without waits for a core;
    `worst_by_clock` includes these. `failures` counts polls without status 200, and `engines` are
    process ids.
    """

    polls: int = 0
    failures: int = 0
    worst_wait: float = 0.0
    worst_by_clock: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)

    @property
    def web_growth(self) -> float:
        return self._growth([web for web, _ in self.memory])

    @property
    def engine_growth(self) -> float:
        return self._growth([engine for _, engine in self.memory])

    @property
    def growth(self) -> float:
        """The maximum growth of both together."""
        return self._growth(self._both())

    @property
    def stays(self) -> float:
        """The growth of both at the end."""
        both = self._both()
        return both[-1] - both[0] if both else 0.0

    @property
    def drift(self) -> float:
        """The growth from the second quarter to the last, when caches are full."""
        both = self._both()
        quarter = len(both) // 4
        return (
            sum(both[-quarter:]) / quarter - sum(both[quarter : 2 * quarter]) / quarter
            if quarter
            else 0.0
        )

    def _both(self) -> list[float]:
        return [web + engine for web, engine in self.memory]

    @staticmethod
    def _growth(samples: list[float]) -> float:
        return max(samples) - samples[0] if samples else 0.0


class Watcher:
    """The watching process. Use it as `with`."""

    def __init__(self, base_url: str, pid: int | None) -> None:
        command = [sys.executable, "-m", "piecework.lab.attack.watch", base_url, str(pid or 0)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        self.seen()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def seen(self) -> Seen:
        """Return what was seen since the last call. Wait for the running poll."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Seen(**json.loads(self._process.stdout.readline()))


class _Watch:
    def __init__(self, base_url: str, pid: int) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._web = psutil.Process(pid) if pid else None
        self._used_cache = 0.0
        self._seen = Seen()
        self._lock = threading.Lock()
        self._polling = threading.Lock()

    def poll(self) -> None:
        """Request `/health` every 50 ms, without end."""
        waits = CoreWaits(self._web.pid if self._web else None)
        while True:
            with self._polling:
                began, before = time.perf_counter(), waits.seconds()
                healthy = self._get("/health") is not None
                seconds = time.perf_counter() - began
                own = seconds - waited(before, waits.seconds())
                seen = self._seen
                seen.polls += 1
                seen.failures += not healthy
                seen.worst_wait = max(seen.worst_wait, own)
                seen.worst_by_clock = max(seen.worst_by_clock, seconds)
            time.sleep(max(0.001, POLL_SECONDS - seconds))

    def _get(self, path: str) -> bytes | None:
        """Return the body of an answer with status 200."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def look_at_cache(self) -> None:
        """Read how much of the KV cache has been used, without end. A late answer makes the server
        look larger, never smaller.
        """
        while self._web is not None:
            self._note_cache()
            time.sleep(_CACHE_SECONDS)

    def _note_cache(self) -> None:
        content = self._get("/metrics")
        if content is not None:
            self._used_cache = used_cache(content.decode())

    def weigh(self) -> None:
        """Sample the processes' memory every 50 ms, without end."""
        while self._web is not None:
            with self._lock:
                self._note_memory()
            time.sleep(POLL_SECONDS)

    def _note_memory(self) -> None:
        assert self._web is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            children = [each for each in self._web.children(recursive=True) if not _compiles(each)]
            engine = sum(map(_resident, children)) - self._used_cache
            self._seen.memory.append((_resident(self._web), engine))
            engines = [child.pid for child in self._web.children() if not _is_helper(child)]
            self._seen.engines = sorted({*self._seen.engines, *engines})
        if len(self._seen.memory) > _MOST_SAMPLES:
            largest = max(self._seen.memory, key=sum)
            self._seen.memory = [
                sample
                for at, sample in enumerate(self._seen.memory)
                if at % 2 == 0 or sample is largest
            ]

    def report(self) -> Seen:
        if self._web is not None:
            self._note_cache()
        with self._polling, self._lock:
            if self._web is not None:
                self._note_memory()
            seen, self._seen = self._seen, Seen()
            if self._web is not None:
                self._note_memory()
        return seen


def _is_helper(process: Any) -> bool:
    """Whether a process of the server may end and be started again at any time."""
    with contextlib.suppress(psutil.Error):
        # A new process still has the command line of its parent.
        is_new = time.time() - process.create_time() < 1
        # A process that has just ended has no command line.
        command = process.cmdline()
        helpers = ("grammar_process", "preprocess_process")
        named = any(helper in part for part in command for helper in helpers)
        return is_new or not command or named
    return True


def _compiles(process: Any) -> bool:
    """Whether a process compiles graphs; the engine starts and ends it."""
    with contextlib.suppress(psutil.Error):
        return any("compile_pieces" in part for part in process.cmdline())
    return False


def used_cache(metrics: str) -> float:
    """Return the MiB of the KV cache that were used at least once, or 0 if the server does not
    report them.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        name = family.name.rpartition(":")[2]
        values[name] = values.get(name, 0.0) + sum(sample.value for sample in family.samples)
    tokens = values.get("max_total_num_tokens", 0.0)
    share = values.get("num_touched_tokens", 0.0) / tokens if tokens else 0.0
    return share * values.get("kv_memory_bytes", 0.0) / _MIB


def _resident(process: Any) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / _MIB
    return 0.0


def server_process(port: int) -> int | None:
    """Return the process of this machine that listens on `port`, or None if there is none or it is
    not visible.
    """
    with contextlib.suppress(psutil.AccessDenied):
        for connection in _listeners():
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                return int(connection.pid)
    return None


def _listeners() -> Iterator[Any]:
    return (
        connection
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def main(base_url: str, pid: str) -> None:
    watch = _Watch(base_url, int(pid))
    for work in (watch.poll, watch.weigh, watch.look_at_cache):
        threading.Thread(target=work, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps(asdict(watch.report())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

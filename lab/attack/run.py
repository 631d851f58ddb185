"""Attack a running server and check that it stays healthy.

Each attack has a limit of requests and of time. A separate process requests `/health` every 50 ms
and measures the memory of the server meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from ...bench.client import Client, RequestFailed, resolve
from ...bench.report import Report
from ...bench.target import Target
from ...runtime.process.progress import progress_bar
from ...server.config.http_limits import room_for_connections
from ...server.serving.state import Kind
from . import answers, bodies, connections, crowds, declarations, images
from .arena import Arena, Attack, together
from .core_waits import CoreWaits, waited
from .fuzz_bodies import FuzzRequest, fuzz_request
from .kinds import SEEDS
from .watch import Seen, Watcher, server_process

_KINDS = (bodies, connections, crowds, answers, declarations, images)
ATTACKS = {attack.name: attack for kind in _KINDS for attack in kind.ATTACKS}
FUZZ = "fuzz"
NAMES = (*ATTACKS, FUZZ)
# Seconds between two attacks. Memory that the server still has then counts as kept.
_SETTLE_SECONDS = 3.0
_MOST_DRIFT_MB = 50.0  # Maximum growth in the second half of a fuzz campaign.
_SLOW_ANSWER = 30.0
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackSettings:
    """The attacks and the goals."""

    attacks: Sequence[str] = tuple(ATTACKS)
    seconds: float = 90.0  # Maximum of one attack.
    max_wait: float = 0.5  # Maximum seconds of a `/health` request.
    max_growth_mb: float = 300.0  # Maximum growth of memory in MiB.
    requests: int = 2000  # This and the following are for fuzz.
    seed: int = 0
    concurrency: int = 8
    allow_other_hosts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one attack."""

    name: str
    about: str
    seconds: float
    answers: Counter[str]
    problems: list[str]
    seen: Seen

    def row(self) -> str:
        answers = ", ".join(
            f"{count:,} x {status}" for status, count in sorted(self.answers.items())
        )
        memory = (
            f"{self.seen.web_growth:.0f} | {self.seen.engine_growth:.0f} | {self.seen.stays:.0f}"
            if self.seen.memory
            else "- | - | -"
        )
        return (
            f"| {self.name}: {self.about} | {self.answers.total():,} | {answers} | "
            f"{self.seen.worst_wait * 1000:.0f} | {self.seen.worst_by_clock * 1000:.0f} | "
            f"{memory} |"
        )

    def missed(self, settings: AttackSettings) -> list[str]:
        """Return the goals that were missed."""
        reasons = [*self.problems]
        if self.seen.failures:
            reasons.append(f"/health failed {self.seen.failures} of {self.seen.polls} times")
        if self.seen.worst_wait > settings.max_wait:
            reasons.append(
                f"/health waited {self.seen.worst_wait:.2f} s for the server, more than --max-wait "
                f"{settings.max_wait:g}"
            )
        if self.seen.growth > settings.max_growth_mb:
            reasons.append(
                f"memory grew by {self.seen.growth:.0f} MB, more than --max-growth-mb "
                f"{settings.max_growth_mb:g}"
            )
        if self.name == FUZZ and self.seen.drift > _MOST_DRIFT_MB:
            reasons.append(
                f"memory does not stay flat: {self.seen.drift:+.0f} MB from the second quarter to "
                "the last"
            )
        return [f"{self.name}: {reason}" for reason in reasons]

    def as_dict(self) -> dict[str, Any]:
        seen = asdict(self.seen)
        del seen["memory"]
        growth = {
            "web_mb": self.seen.web_growth,
            "engine_mb": self.seen.engine_growth,
            "both_mb": self.seen.growth,
        }
        figures = {"growth": growth, "stays_mb": self.seen.stays, "drift_mb": self.seen.drift}
        return {
            "name": self.name,
            "seconds": self.seconds,
            "answers": self.answers,
            "problems": self.problems,
            **seen,
            **figures,
        }


def run(target: Target, settings: AttackSettings, report: Report) -> int:
    """Attack and report. Return 1 if a goal was missed, else 0. Raises `ValueError` for an error
    that the user can correct.
    """
    if not settings.allow_other_hosts:
        _refuse_other_hosts(target.base_url)
    # The attacker needs a file descriptor per connection.
    room_for_connections()
    return asyncio.run(_run(target, settings, report))


def _refuse_other_hosts(base_url: str) -> None:
    host = urlsplit(base_url).hostname or ""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        raise ValueError(f"--base-url {base_url}: there is no such host") from None
    if not all(
        ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses
    ):
        raise ValueError(
            f"--base-url {base_url} is not this machine; --allow-other-hosts attacks it, if it is "
            "yours"
        )


async def _run(target: Target, settings: AttackSettings, report: Report) -> int:
    target, kind = await _resolved(target)
    pid = server_process(urlsplit(target.base_url).port or 80)
    if pid is None:
        report.print(
            [
                "The server's process is not on this machine, or another user's: its memory is not "
                "watched."
            ]
        )
    outcomes = []
    report.print(
        [
            "| attack | requests | answers | worst /health, ms | by the clock, ms | "
            "web process, MB | engine, MB | stays, MB |",
            "|---|---|---|---|---|---|---|---|",
        ]
    )
    with Watcher(target.base_url, pid) as watcher:
        for name in settings.attacks:
            arena = Arena(target.base_url, target.model, target.api_key, settings.seconds, kind)
            outcomes.append(await _attack(name, arena, watcher, settings))
            report.print([outcomes[-1].row()])
    missed = [reason for outcome in outcomes for reason in outcome.missed(settings)]
    engines = sorted({pid for outcome in outcomes for pid in outcome.seen.engines})
    report.print(
        [
            "",
            *missed[:_SHOWN],
            *[f"and {len(missed) - _SHOWN} more"] * (len(missed) > _SHOWN),
            "FAILED" if missed else "PASSED",
        ]
    )
    results = [outcome.as_dict() for outcome in outcomes]
    report.write(
        {
            "base_url": target.base_url,
            **asdict(settings),
            "engines": engines,
            "attacks": results,
            "failed": missed,
        }
    )
    return 1 if missed else 0


async def _resolved(target: Target) -> tuple[Target, Kind]:
    """Return the target with the name of its model, and the kind of the model. One request warms a
    language model up.
    """
    target = await resolve(target)
    async with Client(target) as client:
        try:
            kind: Kind = (await client.get_json("/v1/status"))["kind"]
            if kind == "text":
                body = {"model": target.model, "prompt": "Hi", "max_tokens": 4}
                await client.post("/v1/completions", body)
        except RequestFailed as error:
            raise ValueError(
                f"{target.base_url}: the server does not answer a plain request: {error}"
            ) from None
    return target, kind


async def _attack(name: str, arena: Arena, watcher: Watcher, settings: AttackSettings) -> Outcome:
    """Run one attack, and wait for a while."""
    fuzz = Attack(
        FUZZ,
        f"mutated bodies and odd requests, seed {settings.seed}",
        lambda arena: _fuzz(arena, settings, CoreWaits(*before.engines)),
    )
    attack = ATTACKS.get(name, fuzz)
    before = await asyncio.to_thread(watcher.seen)
    began = time.perf_counter()
    async with arena.open():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.seconds if attack is not fuzz else None):
                await attack.run(arena)
    seconds = time.perf_counter() - began
    await asyncio.sleep(_SETTLE_SECONDS)
    seen = await asyncio.to_thread(watcher.seen)
    if restarted := set(seen.engines) - set(before.engines):
        arena.problems.append(f"the engine was started again, as process {min(restarted)}")
    return Outcome(
        name=name,
        about=attack.about,
        seconds=seconds,
        answers=arena.answers,
        problems=arena.problems,
        seen=seen,
    )


async def _fuzz(arena: Arena, settings: AttackSettings, waits: CoreWaits) -> None:
    """Run the campaign. `waits` are those of the engine."""
    seeds = SEEDS[arena.kind]
    numbers = iter(range(settings.requests))
    with progress_bar(total=settings.requests, desc=FUZZ, unit="request") as bar:

        async def work() -> None:
            for number in numbers:
                await _send(arena, fuzz_request(seeds, settings.seed, number), number, waits)
                bar.update()

        await together(work() for _ in range(settings.concurrency))


async def _send(arena: Arena, request: FuzzRequest, number: int, waits: CoreWaits) -> None:
    began, before = time.perf_counter(), waits.seconds()
    headers = {"Content-Type": request.content_type}
    headers |= {"Content-Encoding": request.coding} if request.coding else {}
    await arena.ask(request.method, request.path, request.body, f"request {number}: ", headers)
    seconds = time.perf_counter() - began - waited(before, waits.seconds())
    if seconds > _SLOW_ANSWER:
        arena.problems.append(
            f"request {number}: {seconds:.0f} s for {request.method} {request.path} with "
            f"{request.body!r:.2000}"
        )

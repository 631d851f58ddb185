"""The settings of a soak, its results, and whether it passed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ...bench.report import Failures
from ...bench.server_process import MIB
from .state import ServerState

_EXAMPLES = 10  # Number of problems that are printed in full.


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """The load, the checks and the faults."""

    num_requests: int = 2000
    concurrency: int = 64
    verify: int = 40  # Requests that are also sent alone and compared.
    settle_seconds: float = 10.0  # Time for the server to become idle after the load.
    max_mismatches: int | None = None  # None: no limit.
    server_pid: int | None = None
    max_memory_growth_mib: float | None = None
    kills: int = 0  # Faults of the engine process of `server_pid`.
    hangs: int = 0
    fault_interval: float = 32.0  # Seconds of service between two faults.
    duration: float = 0.0  # Seconds for which the load repeats.
    overload: bool = False  # The server may refuse with 429 or 503 and `Retry-After`.
    max_under_way: int | None = None  # Maximum requests that run and wait.

    def __post_init__(self) -> None:
        if (self.kills or self.hangs) and self.server_pid is None:
            raise ValueError(
                "--kill-engine and --hang-engine need --server-pid, the process of a server of "
                "this machine"
            )


@dataclass(slots=True)
class SoakResult:
    """The results of a soak. `outcomes` counts requests by their end, and `problems` are faults of
    answers.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    problems: list[str] = field(default_factory=list)
    verified: int = 0
    mismatches: list[str] = field(default_factory=list)
    state: ServerState | None = None
    # Faults of the engine process after which the server served again.
    faults: Counter[str] = field(default_factory=Counter)
    # Maximum requests running and waiting, read every half second.
    most_under_way: int | None = None
    # Bytes at the start of the load, then every half second, then at its end.
    memory: list[int] = field(default_factory=list)

    @property
    def memory_growth_mib(self) -> float | None:
        """The growth since the first quarter of the load, when caches are full; None if memory was
        not watched.
        """
        if not self.memory:
            return None
        return (self.memory[-1] - self.memory[len(self.memory) // 4]) / MIB

    def verdict(self, settings: SoakSettings) -> list[str]:
        """Return why the soak failed; nothing if it passed."""
        reasons = []
        if self.failures.total:
            reasons.append(f"{self.failures.total} requests failed")
        if self.problems:
            reasons.append(f"{len(self.problems)} answers were wrong")
        if self.state is not None and not self.state.idle:
            reasons.append(f"the server is not idle: {self.state.line()}")
        if settings.max_mismatches is not None and len(self.mismatches) > settings.max_mismatches:
            reasons.append(f"{len(self.mismatches)} answers differ from the same request alone")
        most, bound = self.most_under_way, settings.max_under_way
        if bound is not None and (most is None or most > bound):
            reasons.append(f"{most} requests ran and waited at once, more than {bound}")
        if settings.overload and not self.outcomes["refused"]:
            reasons.append("no request was refused: this was no overload; raise --concurrency")
        if self.faults.total() < settings.kills + settings.hangs:
            reasons.append(
                f"the server survived {self.faults.total()} of {settings.kills + settings.hangs} "
                "faults of its engine"
            )
        growth = self.memory_growth_mib
        if (
            growth is not None
            and settings.max_memory_growth_mib is not None
            and growth > settings.max_memory_growth_mib
        ):
            reasons.append(f"the server's memory grew by {growth:.1f} MiB")
        return reasons

    def lines(self) -> list[str]:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        lines = [
            f"Requests:   {outcomes}",
            *self.failures.lines(),
            f"Wrong:      {len(self.problems)}",
        ]
        lines += [f"  {problem}" for problem in self.problems[:_EXAMPLES]]
        lines.append(
            f"Verified:   {self.verified} answers compared with the same request alone, "
            f"{len(self.mismatches)} differ"
        )
        lines += [f"  {mismatch}" for mismatch in self.mismatches[:_EXAMPLES]]
        unknown = "not checked, the server has neither /server_info nor /metrics"
        lines.append(f"At the end: {unknown if self.state is None else self.state.line()}")
        if self.most_under_way is not None:
            lines.append(f"Under way:  {self.most_under_way} requests at most, running and waiting")
        if self.faults:
            lines.append(
                "Engine:     "
                f"{', '.join(f'{count} times {kind}' for kind, count in self.faults.most_common())}"
            )
        if self.memory:
            figures = (
                f"{self.memory[0] / MIB:.1f} MiB at the start, {max(self.memory) / MIB:.1f} "
                f"at most, {self.memory[-1] / MIB:.1f} at the end"
            )
            lines.append(
                f"Memory:     {figures}; growth since the first quarter "
                f"{self.memory_growth_mib:+.1f} MiB"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcomes": dict(self.outcomes),
            "failures": self.failures.as_dict(),
            "problems": self.problems,
            "verified": self.verified,
            "mismatches": self.mismatches,
            "state": None if self.state is None else asdict(self.state),
            "faults": dict(self.faults),
            "most_under_way": self.most_under_way,
            "memory_bytes": self.memory,
            "memory_growth_mib": self.memory_growth_mib,
        }

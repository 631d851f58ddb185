"""What a kind of engine implements. `loop` runs it, and `rank_process` repeats its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ..core.messages import FromEngine
from ..distributed.ranks import Ranks


class Work(NamedTuple):
    """What the next step of an engine does.

    Attributes:
        doing: The work in words, for the heartbeat.
        may_build: That of `EngineAlive`.
        patience: Milliseconds to wait for a message before the step.
    """

    doing: str
    may_build: bool = False
    patience: int = 0


class ServedEngine(Protocol):
    """The requests of one kind and how they are computed, without messages, signals or ranks.

    On rank 0 of a server, `Loop` uses an engine in this way:

        engine = kind.build(settings, ranks)
        send(engine.ready())
        engine.connect(heartbeat, pause)
        while not shut_down:
            for message in receive(engine.work()):  # Waits if there is no work.
                send_all(engine.handle(message))
            send_all(engine.step())
        engine.close()

    An error of one request ends that request: `handle` and `step` send it as an output. Errors
    that they raise end the process.
    """

    @property
    def ranks(self) -> Ranks: ...

    def ready(self) -> FromEngine:
        """Return the message that says what is served."""
        ...

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        """Call `beat` often during a step, which may take minutes.

        Call `pause` at points of a long step where requests may be added and aborted.
        """
        ...

    def work(self) -> Work | None:
        """Describe the next step, or return None if only a message can bring work."""
        ...

    def handle(self, message: Any) -> Iterable[FromEngine]:
        """Handle a message, such as a new request. Return the answers."""
        ...

    def abort(self, rids: list[str]) -> None:
        """End these requests without output. Unknown ids are ignored."""
        ...

    def step(self) -> Iterable[FromEngine]:
        """Do one piece of work, if there is any. Return the results."""
        ...

    def report(self) -> FromEngine:
        """Return a message with the current statistics."""
        ...

    def give_back_memory(self) -> None:
        """Free memory that only the last steps needed. Called when the engine stays idle."""
        ...

    def close(self) -> None:
        """Release what would outlive the process. Called at a regular end."""
        ...


class RankedEngine(ServedEngine, Protocol):
    """An engine that can have several ranks."""

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """What the other ranks do, by the names that rank 0 passes to `Ranks.call`."""
        ...

    @property
    def expects_step(self) -> bool:
        """Whether rank 0 of a server makes its next call within `--dist-timeout`."""
        ...


class Kind(Protocol):
    """A module that implements a kind of engine. The processes import it by name."""

    def start_ranks(self, settings: dict[str, Any]) -> Ranks:
        """Start the other ranks, which begin to load. Raise `ValueError` with a remedy."""
        ...

    def build(self, settings: dict[str, Any], ranks: Ranks) -> ServedEngine:
        """Build the engine of a rank. Raise `ValueError` for what the user can correct.

        With several ranks, the engine must be a `RankedEngine`.
        """
        ...

"""A request whose result may be an error."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ...runtime.core.generation import FinishReason
from ..core.errors import InternalError
from ..engine.results import Job, M, T
from ..engine.state import EngineUnavailable


class RaisingJob(Job[M, T]):
    """A request whose result may be an error, which its reader raises."""

    def end(self, reason: FinishReason, error: str | None) -> None:
        if self.result.done():
            return
        if reason is FinishReason.ABORT:
            self.result.set_exception(EngineUnavailable("the server is stopping"))
        else:
            message = f"The engine could not finish the request: {error}."
            self.result.set_exception(InternalError(message, code="engine_error"))
        # Retrieve the exception: the reader may be gone or have read the error of another job.
        self.result.exception()

    def take(self, output: Any) -> None:
        if output.error is not None:
            self.end(FinishReason.ERROR, output.error)
        elif not self.result.done():
            self.result.set_result(self.value(output))

    @abstractmethod
    def value(self, output: Any) -> T:
        """Return the result that an output holds."""

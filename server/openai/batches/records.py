"""Files and batches as they are stored on disk and shown by the API."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Status(StrEnum):
    """The state of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class FileRecord(msgspec.Struct, kw_only=True):
    """A file. Times are in seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class RequestCounts(msgspec.Struct):
    """Numbers of lines: all lines, lines with an answer, lines with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in (
            Status.COMPLETED,
            Status.FAILED,
            Status.EXPIRED,
            Status.CANCELLED,
        )

    def become(self, status: Status, now: float) -> None:
        """Change the status, and set its time if the record has a member for it."""
        self.status = status
        if f"{status}_at" in self.__struct_fields__:
            setattr(self, f"{status}_at", int(now))

    def fail(self, faults: list[dict[str, Any]], now: float) -> None:
        """End the batch with these errors."""
        self.errors = {"object": "list", "data": faults}
        self.become(Status.FAILED, now)


def fault(
    code: str, message: str, *, param: str | None = None, line: int | None = None
) -> dict[str, Any]:
    """Return one of a batch's errors. `line` counts from 1."""
    return {"code": code, "message": message, "param": param, "line": line}

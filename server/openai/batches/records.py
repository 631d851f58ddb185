"""Files and batches as they are stored on disk and shown by the API."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from ...core.answers import Answer

Purpose = Literal["batch", "batch_output"]


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


class FileRecord(Answer, kw_only=True):
    """A file. Times are in seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class BatchFault(Answer):
    """One error of a batch. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[BatchFault]


class BatchCounts(Answer):
    """Numbers of lines: all lines, lines with an answer, lines with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(Answer, kw_only=True):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchFaults | None = None
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
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
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

    def fail(self, faults: Sequence[BatchFault], now: float) -> None:
        """End the batch with these errors."""
        self.errors = BatchFaults(data=faults)
        self.become(Status.FAILED, now)

"""Models of files and batches.

Source: https://platform.openai.com/docs/api-reference/files and .../batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.answers import Answer
from ...core.schemas import Metadata, WireModel

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class BatchRequest(WireModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[
        str,
        Field(
            pattern=r"^[1-9][0-9]{0,3}[smhd]$",
            description="a number and s, m, h or d, for example 24h",
        ),
    ]
    metadata: Metadata | None = None
    output_expires_after: Any = None

    @property
    def seconds(self) -> int:
        """Length of the completion window in seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]


class FileAnswer(Answer):
    """A file. Times are in seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(Answer):
    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(Answer):
    """One error of a batch. `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(Answer):
    object: Literal["list"]
    data: Sequence[BatchFault]


class BatchCounts(Answer):
    total: int
    completed: int
    failed: int


class BatchAnswer(Answer):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Answer):
    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool

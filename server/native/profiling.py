"""SGLang's endpoints that profile the engine. Traces are written below `--profile-dir`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ...runtime.core.messages import MOST_PROFILED_STEPS, ProfileAnswer, StartProfile, StopProfile
from ..core.answers import Answer, answers
from ..core.errors import InvalidRequest
from ..core.schemas import Unsupported, WireModel
from ..http.body import OptionalJsonRoute
from ..serving.state import Serving, ServingDep, json_response

body_router = APIRouter(route_class=OptionalJsonRoute)
router = APIRouter()
_MOST_BYTES = 4 * 2**30  # Maximum size of all traces below the folder.


class ProfileBody(WireModel):
    """Body of `POST /start_profile`, which is optional."""

    output_dir: str = Field("", max_length=200)
    num_steps: Annotated[int, Field(ge=1, le=MOST_PROFILED_STEPS)] | None = None
    activities: list[Literal["CPU", "GPU"]] = Field(["CPU", "GPU"], min_length=1, max_length=2)
    with_stack: bool = False
    record_shapes: bool = False
    start_step: Unsupported = None
    profile_by_stage: Unsupported = None
    merge_profiles: Unsupported = None


class ProfileResult(Answer):
    """`paths` are the traces of the engines, which exist once they are written."""

    success: bool
    message: str
    paths: list[str]


@body_router.post("/start_profile", responses=answers(ProfileResult, errors=(400, 413, 415, 503)))
async def start_profile(body: ProfileBody, serving: ServingDep) -> Response:
    """Profile the next `num_steps` steps of the engine, or all steps until `/stop_profile`."""
    folder = await asyncio.to_thread(_folder, serving, body.output_dir)
    results = await serving.engine.profile(
        StartProfile(
            folder=folder,
            num_steps=body.num_steps,
            activities=list(body.activities),
            with_stack=body.with_stack,
            record_shapes=body.record_shapes,
        )
    )
    return _response(results, "Profiling; the trace is written when the profile ends.")


@router.post("/stop_profile", responses=answers(ProfileResult, errors=(400, 503)))
async def stop_profile(serving: ServingDep) -> Response:
    """End the profile. Its trace is written in the background."""
    _profile_dir(serving)
    return _response(await serving.engine.profile(StopProfile()), "The trace is being written.")


def _response(results: list[ProfileAnswer], message: str) -> Response:
    """Return the answer. Some engines may have ended their profile already, or had no step."""
    failed = [result.error for result in results if result.error is not None]
    paths = [result.path for result in results if result.path is not None]
    if not paths:
        raise InvalidRequest(f"{failed[0]}.", code="profile_state")
    if failed:
        message = f"{message} At least one engine failed: {failed[0]}."
    return json_response(ProfileResult(success=True, message=message, paths=paths))


def _profile_dir(serving: Serving) -> str:
    folder = serving.config.profile_dir
    if folder is None:
        raise InvalidRequest(
            "Profiles are off; start the server with --profile-dir FOLDER.", code="profiles_off"
        )
    return os.path.realpath(folder)


def _folder(serving: Serving, output_dir: str) -> str:
    """Return the folder of a request. Raise `InvalidRequest` if it is not below ours or ours is
    full.
    """
    root = _profile_dir(serving)
    try:
        chosen = os.path.realpath(os.path.join(root, output_dir))
        is_below = os.path.commonpath([root, chosen]) == root
    except ValueError:  # a byte of zero
        is_below = False
    if not is_below:
        raise InvalidRequest(
            "output_dir: traces are written below --profile-dir alone; send a name, or leave it "
            "out.",
            param="output_dir",
            code="invalid_value",
        )
    size = sum(_sizes(root))
    if size > _MOST_BYTES:
        raise InvalidRequest(
            f"--profile-dir holds {size >> 20} MiB, more than {_MOST_BYTES >> 20}; delete traces.",
            code="profiles_full",
        )
    return chosen


def _sizes(root: str) -> Iterator[int]:
    for folder, _, names in os.walk(root):
        for name in names:
            # The engine renames a trace when it is complete.
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(folder, name)).st_size

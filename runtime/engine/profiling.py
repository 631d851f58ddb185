"""Profiles of the engine's steps by torch.profiler, as traces that Perfetto and Chrome open."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch.profiler as torch_profiler

from ..core.messages import MOST_PROFILED_STEPS, ProfileAnswer, StartProfile

logger = logging.getLogger(__name__)

SUFFIX = ".trace.json.gz"


class Profiler:
    """Takes one profile at a time, of the thread that starts it.

    While `is_running`, that thread calls `step` after each step. Another thread writes the trace,
    so that steps continue.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._profile: Any = None
        self._path = ""
        self._steps_left = 0
        self._writing: threading.Thread | None = None

    def start(self, asked: StartProfile) -> ProfileAnswer:
        """Start a profile. The answer holds the path of the trace, or an error."""
        if self.is_running:
            return ProfileAnswer(error="a profile is running; stop it first")
        if self._writing is not None and self._writing.is_alive():
            return ProfileAnswer(error="the last profile is still being written; try again")
        supported = torch_profiler.supported_activities()  # type: ignore[no-untyped-call]
        wanted = {
            activity
            for activity in supported
            if ("CPU" if activity.name == "CPU" else "GPU") in asked.activities
        }
        if not wanted:
            return ProfileAnswer(error="activities: this machine has no GPU; ask for CPU")
        try:
            os.makedirs(asked.folder, exist_ok=True)
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
            self._path = os.path.join(asked.folder, name)
            # Find out now whether the file can be written, not after the last step.
            with open(self._part, "wb"):
                pass
            self._profile = torch_profiler.profile(
                activities=wanted,
                with_stack=asked.with_stack,
                record_shapes=asked.record_shapes,
            )
            self._profile.start()
        except (OSError, RuntimeError) as error:
            return ProfileAnswer(error=f"the profile cannot start: {error}")
        self._steps_left = min(asked.num_steps or MOST_PROFILED_STEPS, MOST_PROFILED_STEPS)
        self.is_running = True
        return ProfileAnswer(path=self._path)

    def step(self) -> None:
        """Count a finished step. The last one that was asked for stops the profile."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.stop()

    def stop(self) -> ProfileAnswer:
        """Stop the profile. The answer holds the path to which the trace is being written."""
        if not self.is_running:
            return ProfileAnswer(error="no profile is running")
        self.is_running = False
        profile, self._profile = self._profile, None
        profile.stop()
        self._writing = threading.Thread(
            target=_write, args=(profile, self._part, self._path), name="profile", daemon=True
        )
        self._writing.start()
        return ProfileAnswer(path=self._path)

    def wait(self) -> None:
        """Wait until the last profile is written."""
        if self._writing is not None:
            self._writing.join()

    @property
    def _part(self) -> str:
        return f"{self._path.removesuffix(SUFFIX)}.part{SUFFIX}"


def _write(profile: Any, part: str, path: str) -> None:
    """Write the trace under a temporary name, then rename it."""
    try:
        profile.export_chrome_trace(part)
        os.replace(part, path)
        logger.info("the profile is written to %s", path)
    except Exception as error:
        logger.error("the profile cannot be written to %s: %s", path, error)
        with suppress(OSError):
            os.unlink(part)

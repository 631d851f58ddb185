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
    """One profile at a time, of the thread that starts it, which also calls `step` after each step
    while `is_running`. It is written in a thread, so that steps go on.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._profile: Any = None
        self._path = ""
        self._steps_left = 0
        self._writing: threading.Thread | None = None

    def start(self, asked: StartProfile) -> ProfileAnswer:
        """The answer says where the trace will be."""
        if self.is_running:
            return ProfileAnswer(error="a profile is running; stop it first")
        if self._writing is not None and self._writing.is_alive():
            return ProfileAnswer(error="the last profile is still being written; try again")
        supported = torch_profiler.supported_activities()  # type: ignore[no-untyped-call]
        wanted = {
            each
            for each in supported
            if ("CPU" if each.name == "CPU" else "GPU") in asked.activities
        }
        if not wanted:
            return ProfileAnswer(error="activities: this machine has no GPU; ask for CPU")
        try:
            os.makedirs(asked.folder, exist_ok=True)
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
            self._path = os.path.join(asked.folder, name)
            # Found out now, and not when the steps are over.
            with open(self._part, "wb"):
                pass
            self._profile = torch_profiler.profile(
                activities=wanted,
                with_stack=asked.with_stack,
                record_shapes=asked.record_shapes,
            )
            self._profile.start()
        except (OSError, RuntimeError) as error:
            return ProfileAnswer(error=f"the profile cannot begin: {error}")
        self._steps_left = min(asked.num_steps or MOST_PROFILED_STEPS, MOST_PROFILED_STEPS)
        self.is_running = True
        return ProfileAnswer(path=self._path)

    def step(self) -> None:
        """A step is done; the last one that was asked for ends the profile."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.stop()

    def stop(self) -> ProfileAnswer:
        """The answer says where the trace will be as soon as it is written."""
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
        """Until the last profile is written."""
        if self._writing is not None:
            self._writing.join()

    @property
    def _part(self) -> str:
        return f"{self._path.removesuffix(SUFFIX)}.part{SUFFIX}"


def _write(profile: Any, part: str, path: str) -> None:
    """Under another name until it is whole."""
    try:
        profile.export_chrome_trace(part)
        os.replace(part, path)
        logger.info("the profile is written to %s", path)
    except Exception as error:
        logger.error("the profile cannot be written to %s: %s", path, error)
        with suppress(OSError):
            os.unlink(part)

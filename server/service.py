"""What a server runs: an engine, the application over it, and what to say once it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI

from .engine.supervisor import EngineSupervisor


class Service(NamedTuple):
    """`summary`: (port, seconds since the start) to the lines to print, called once the engine is
    ready.
    """

    engine: EngineSupervisor[Any]
    app: FastAPI
    summary: Callable[[int, float], str]

"""The formats that exist, by their names. A format of tool calls is a file with `FORMATS`."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from .harmony import REASONING
from .reasoning import THOUGHT_FORMATS, ReasoningFormat
from .tool_calls import ToolCallFormat


@cache
def formats() -> dict[str, ToolCallFormat]:
    """Return every format of tool calls by its name."""
    package = import_module(__package__)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [import_module(f"{__package__}.{name}") for name in names]
    return {form.name: form for module in modules for form in getattr(module, "FORMATS", ())}


@cache
def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Return every format of thoughts by its name."""
    return {form.name: form for form in (*THOUGHT_FORMATS, REASONING)}

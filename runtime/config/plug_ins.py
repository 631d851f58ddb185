"""Settings of code that a user brings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .options import option

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class PlugInsConfig:
    """Which classes of the user run in the engine process. A part of `EngineConfig`."""

    logits_processors: str = option(
        "",
        "classes that change the logits of all requests (module:Class,module:Class), with the "
        "interface of vLLM's v1 engine; they run in the engine process and turn speculation off; "
        "default: none",
        group="sampling",
        metavar="LIST",
        items=r"[^-].*",
    )

    @property
    def plug_ins(self) -> list[str]:
        """The classes of `logits_processors`."""
        return [name.strip() for name in self.logits_processors.split(",") if name.strip()]

    def check_plug_ins(self, ranks: int, algorithm: str) -> None:
        """Raise `ValueError` for a name that is no class, and for what excludes plug-ins."""
        for name in self.plug_ins:
            if not _CLASS.fullmatch(name):
                raise ValueError(
                    f"--logits-processors: {name!r} is not module:Class; write for example "
                    "my_package.processors:Ban"
                )
        if self.plug_ins and ranks > 1:
            raise ValueError(
                "--logits-processors runs on one rank, because the classes see whole logits: leave "
                "--tp-size out"
            )
        if self.plug_ins and algorithm not in ("auto", "none"):
            raise ValueError(
                f"--logits-processors and --speculative-algorithm {algorithm} exclude each other, "
                "because the classes do not know tokens that are not verified yet: leave one out"
            )

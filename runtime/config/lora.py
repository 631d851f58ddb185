"""Settings of adapters (LoRA)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from .options import option

LORA = "adapters (LoRA)"
_KEPT = 8  # By default, host memory keeps this many adapters for each slot of the device.
_MOST_SLOTS, _MOST_RANK, _MOST_KEPT = 1024, 512, 1_000_000


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Which adapters an engine has, and how many at once. A part of `EngineConfig`."""

    enable_lora: bool = option(
        False,
        "reserve memory for adapters, which may be loaded while the server runs; implied by "
        "--lora-modules",
        group=LORA,
    )
    lora_modules: str = option(
        "",
        "adapters to load at start (sql=./sql-adapter,chat=./chat-adapter): folders of PEFT; "
        "requests choose one by its name as `model`; default: none",
        group=LORA,
        metavar="LIST",
        items=r"[^-].*",
    )
    max_loras: int = option(8, "number of adapters that one step can use", group=LORA, metavar="N")
    max_lora_rank: int | None = option(
        None,
        "largest rank of an adapter; default: the largest of --lora-modules, at least 16",
        group=LORA,
        metavar="N",
    )
    max_cpu_loras: int | None = option(
        None,
        "number of adapters that are kept in host memory; others are read again when a request "
        "needs them; default: 8 times --max-loras",
        group=LORA,
        metavar="N",
    )

    def check_lora(self) -> None:
        """Raise `ValueError` for a value that is out of range."""
        for flag, value, most in (
            ("--max-loras", self.max_loras, _MOST_SLOTS),
            ("--max-lora-rank", self.max_lora_rank, _MOST_RANK),
            ("--max-cpu-loras", self.max_cpu_loras, _MOST_KEPT),
        ):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{flag} must lie between 1 and {most}, got {value}")
        self.lora_modules_by_name()

    @property
    def uses_lora(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def most_cpu_loras(self) -> int:
        """Number of adapters that are kept in host memory."""
        return max(self.max_loras, self.max_cpu_loras or _KEPT * self.max_loras)

    def lora_modules_by_name(self) -> dict[str, str]:
        """Return the paths of --lora-modules. Raise `ValueError`."""
        found: dict[str, str] = {}
        for name, path in _modules(self.lora_modules):
            if not name or not path:
                raise ValueError(f"--lora-modules takes NAME=PATH, got {self.lora_modules!r:.200}")
            if name in found:
                raise ValueError(f"--lora-modules has the name {name!r:.200} twice")
            found[name] = path
        return found


def _modules(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and paths of a list of NAME=PATH, PATH and JSON objects, as vLLM and SGLang take
    them. Raise `ValueError` for JSON that cannot be read.
    """
    while text := text.lstrip(", "):
        if text.startswith("{"):
            try:
                module, end = json.JSONDecoder().raw_decode(text)
                yield str(module["name"]), str(module["path"])
            except (ValueError, KeyError, RecursionError):
                raise ValueError(
                    "--lora-modules takes NAME=PATH or "
                    f"""'{{"name": "NAME", "path": "PATH"}}', got {text!r:.200}"""
                ) from None
            text = text[end:]
        else:
            item, _, text = text.partition(",")
            name, is_named, path = item.partition("=")
            yield name, path if is_named else name

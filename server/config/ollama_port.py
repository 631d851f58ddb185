"""A second port, for clients that know only Ollama's."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.config.options import option


@dataclass(frozen=True, kw_only=True)
class OllamaPort:
    """A second port of the same server. A part of every server's settings."""

    ollama_port: int | None = option(
        None,
        "a second port to listen on, with the same endpoints, limits and keys, for clients of "
        "Ollama that expect 11434; default: none",
        group="server",
        metavar="N",
    )

    def check_ollama_port(self, port: int) -> None:
        """Raise `ValueError` for a number that is no port or is the server's first port."""
        if self.ollama_port is None:
            return
        if not 1 <= self.ollama_port <= 65535:
            raise ValueError(f"--ollama-port must lie between 1 and 65535, got {self.ollama_port}")
        if self.ollama_port == port:
            raise ValueError(
                f"--ollama-port {port} is --port already, which answers Ollama's clients too; "
                "leave it out"
            )

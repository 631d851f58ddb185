"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option

SPECULATION = "speculative decoding"
ALGORITHMS = ("auto", "none", "ngram", "prediction")
_MOST_DRAFT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How an engine guesses tokens that a step verifies. A part of `EngineConfig`."""

    speculative_algorithm: str = option(
        "auto",
        "how to guess tokens that one step verifies together; texts do not change. ngram: what "
        "followed the last tokens before, in the request or in recent answers; prediction: the "
        "text that the client sends as `prediction`; auto: both, on a CPU, and prediction "
        "elsewhere; none: no guesses",
        group=SPECULATION,
        choices=ALGORITHMS,
    )
    speculative_num_draft_tokens: int = option(
        32,
        "most tokens that a step verifies for one request; the number is chosen for each step by "
        "how often guesses were right and by what a row costs",
        group=SPECULATION,
        metavar="N",
    )

    def check_speculation(self) -> None:
        """Raise `ValueError` for a value that is out of range."""
        if not 1 <= self.speculative_num_draft_tokens <= _MOST_DRAFT_TOKENS:
            raise ValueError(
                f"--speculative-num-draft-tokens must be between 1 and {_MOST_DRAFT_TOKENS}, got "
                f"{self.speculative_num_draft_tokens}; --speculative-algorithm none turns "
                "speculation off"
            )

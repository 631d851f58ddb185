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
    speculative_draft_model_path: str | None = option(
        None,
        "a smaller model with the same tokenizer that guesses; default: none",
        group=SPECULATION,
        metavar="PATH",
    )
    speculative_num_steps: int = option(
        5,
        "most tokens that the draft model guesses for one request and step",
        group=SPECULATION,
        metavar="N",
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
        for flag, value in (
            ("--speculative-num-draft-tokens", self.speculative_num_draft_tokens),
            ("--speculative-num-steps", self.speculative_num_steps),
        ):
            if not 1 <= value <= _MOST_DRAFT_TOKENS:
                raise ValueError(
                    f"{flag} must be between 1 and {_MOST_DRAFT_TOKENS}, got {value}; "
                    "--speculative-algorithm none turns speculation off"
                )

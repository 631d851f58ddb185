"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option

SPECULATION = "speculative decoding"
ALGORITHMS = ("auto", "none", "ngram", "prediction", "eagle3", "nextn")
HEADS = ("eagle3", "nextn")  # A head of the model guesses, beside what `auto` means.
_MOST_DRAFT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How an engine guesses tokens that a step verifies. A part of `EngineConfig`."""

    speculative_algorithm: str = option(
        "auto",
        "how to guess tokens that one step verifies together; texts do not change. ngram: what "
        "followed the last tokens before, in the request or in recent answers; prediction: the "
        "text that the client sends as `prediction`; auto: both, on a CPU, and prediction "
        "elsewhere; eagle3: also the head of EAGLE-3 in --speculative-draft-model-path; nextn: "
        "also the model's own layer that predicts further tokens; none: no guesses",
        group=SPECULATION,
        choices=ALGORITHMS,
    )
    speculative_draft_model_path: str | None = option(
        None,
        "a smaller model with the same tokenizer that guesses, or with --speculative-algorithm "
        "eagle3 a head; default: none",
        group=SPECULATION,
        metavar="PATH",
    )
    speculative_num_steps: int = option(
        5,
        "most tokens that the draft model or head guesses for one request and step",
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
        algorithm, path = self.speculative_algorithm, self.speculative_draft_model_path
        if algorithm == "eagle3" and path is None:
            raise ValueError(
                "--speculative-algorithm eagle3 needs --speculative-draft-model-path, the folder "
                "of the head"
            )
        if algorithm == "nextn" and path is not None:
            raise ValueError(
                "--speculative-algorithm nextn takes the layer from the model's own folder: leave "
                f"--speculative-draft-model-path {path} out, or take auto for a draft model"
            )

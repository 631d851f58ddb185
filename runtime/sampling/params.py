"""How one sequence is to be sampled; the numbers a request carries from the API to the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TOP_LOGPROBS_LIMIT = 100
"""Most alternatives that may be asked for at one position."""
_COLDEST = 1e-6
"""Temperatures below it are greedy, as SGLang's: logits divided by less may overflow float32, in
which they are sampled.
"""
_LEAST_REPETITION_PENALTY = 0.01
"""Logits divided by less may overflow float32."""
_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters of one sequence.

    `max_tokens` is another name to give `max_new_tokens` by, OpenAI's and vLLM's; it is kept under
    the second alone. `temperature` 0, and what is below 1e-6, is greedy, and so is `top_p` 0.
    `top_k` -1 keeps the whole vocabulary. `seed` None draws one from the server's seed. `logprobs`
    None returns none, 0 the chosen token's only, k the k likeliest besides; they are the natural
    logarithms of softmax(logits) before temperature, penalties and bias. `prompt_logprobs` is the
    same for the prompt's tokens, from position `prompt_logprobs_start` on. `stop_token_ids` end the
    sequence; so does the model's end-of-sequence token unless `ignore_eos`. Before `min_new_tokens`
    tokens neither can be sampled.

    Raises `ValueError` that names the parameter and its range.
    """

    max_new_tokens: int = _NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    max_tokens: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._settle_max_new_tokens()
        _require(self.max_new_tokens >= 0, "max_new_tokens", "at least 0", self.max_new_tokens)
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            "between 0 and max_new_tokens",
            self.min_new_tokens,
        )
        _require(
            _within(self.temperature, 0.0, 100.0),
            "temperature",
            "between 0 and 100",
            self.temperature,
        )
        _require(_within(self.top_p, 0.0, 1.0), "top_p", "between 0 and 1", self.top_p)
        _require(self.top_k == -1 or self.top_k >= 1, "top_k", "-1 (all) or at least 1", self.top_k)
        _require(_within(self.min_p, 0.0, 1.0), "min_p", "between 0 and 1", self.min_p)
        _require(
            _within(self.presence_penalty, -2.0, 2.0),
            "presence_penalty",
            "between -2 and 2",
            self.presence_penalty,
        )
        _require(
            _within(self.frequency_penalty, -2.0, 2.0),
            "frequency_penalty",
            "between -2 and 2",
            self.frequency_penalty,
        )
        _require(
            _within(self.repetition_penalty, _LEAST_REPETITION_PENALTY, 2.0),
            "repetition_penalty",
            f"between {_LEAST_REPETITION_PENALTY} and 2",
            self.repetition_penalty,
        )
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**64,
            "seed",
            "a 64-bit integer",
            self.seed,
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                count is None or 0 <= count <= TOP_LOGPROBS_LIMIT,
                name,
                f"between 0 and {TOP_LOGPROBS_LIMIT}",
                count,
            )
        for token, bias in self.logit_bias.items():
            _require(
                _within(bias, -100.0, 100.0),
                "logit_bias",
                "between -100 and 100",
                f"{bias} for token {token}",
            )

    def _settle_max_new_tokens(self) -> None:
        if self.max_tokens is None:
            return
        if self.max_new_tokens not in (_NEW_TOKENS, self.max_tokens):
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} and max_tokens {self.max_tokens} are two "
                "names of one number; give one"
            )
        object.__setattr__(self, "max_new_tokens", self.max_tokens)
        object.__setattr__(self, "max_tokens", None)

    @property
    def greedy(self) -> bool:
        return self.temperature < _COLDEST or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, name: str, wanted: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {got}")

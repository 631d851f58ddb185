"""How one sequence is sampled: the numbers that a request carries from the API to the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOP_LOGPROBS_LIMIT = 100  # Alternatives at one position.
# Lower temperatures are greedy, as in SGLang: logits divided by them may overflow float32.
_LEAST_TEMPERATURE = 1e-6
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    # Logits divided by a smaller number may overflow float32.
    ("repetition_penalty", 0.01, 2.0),
)
_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters of one sequence.

    Raises `ValueError`, which names the parameter and its range.

    Attributes:
        max_tokens: OpenAI's and vLLM's name of `max_new_tokens`. The value is stored only there.
        temperature: Values below 1e-6 are greedy.
        top_p: 0 is greedy.
        top_k: -1 keeps the whole vocabulary.
        seed: None draws a seed from the server's seed.
        logprobs: None for no log-probabilities, 0 for those of the chosen tokens, k for the k most
            likely tokens too. They are natural logarithms of softmax(logits), before temperature,
            penalties and bias.
        prompt_logprobs: The same for the tokens of the prompt, from `prompt_logprobs_start` on.
        stop_token_ids: Tokens that end the sequence, beside the model's end-of-sequence tokens.
        ignore_eos: Whether the model's end-of-sequence tokens do not end the sequence.
        min_new_tokens: Number of tokens before which no token that ends the sequence is sampled.
        grammar: The grammar of the text, made by `sampling.grammar`. If no token can follow, the
            sequence ends.
        thinking_budget: Number of tokens of a thought. It begins with `thought_begin_ids`, or with
            the sequence if there are none. Then `thought_end_ids` are appended.
        extra_args: What `--logits-processors` read of a request: `vllm_xargs`.
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
    grammar: str | None = None
    thinking_budget: int | None = None
    thought_begin_ids: list[int] = field(default_factory=list)
    thought_end_ids: list[int] = field(default_factory=list)
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            if self.max_new_tokens not in (_NEW_TOKENS, self.max_tokens):
                raise ValueError(
                    f"max_new_tokens {self.max_new_tokens} and max_tokens {self.max_tokens} are "
                    "two names of one number; give one"
                )
            object.__setattr__(self, "max_new_tokens", self.max_tokens)
            object.__setattr__(self, "max_tokens", None)
        if self.max_new_tokens < 0:
            raise _wrong("max_new_tokens", "at least 0", self.max_new_tokens)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise _wrong("min_new_tokens", "between 0 and max_new_tokens", self.min_new_tokens)
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise _wrong(name, f"between {low:g} and {high:g}", getattr(self, name))
        if self.top_k != -1 and self.top_k < 1:
            raise _wrong("top_k", "-1 (all) or at least 1", self.top_k)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise _wrong("seed", "a 64-bit integer", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= TOP_LOGPROBS_LIMIT:
                raise _wrong(name, f"between 0 and {TOP_LOGPROBS_LIMIT}", count)
        if self.thinking_budget is not None:
            if self.thinking_budget < 0:
                raise _wrong("thinking_budget", "at least 0", self.thinking_budget)
            if not self.thought_end_ids:
                raise ValueError("thinking_budget needs thought_end_ids, which close the thought")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise _wrong("logit_bias", "between -100 and 100", f"{bias} for token {token}")

    @property
    def greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _wrong(name: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {got}")

"""How one sequence is to be sampled; the numbers a request carries from the API to the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

TOP_LOGPROBS_LIMIT = 100
"""Most alternatives that may be asked for at one position."""
_COLDEST = 1e-6
"""Temperatures below it are greedy, as SGLang's: logits divided by less may overflow float32, in
which they are sampled.
"""
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    # Logits divided by less may overflow float32.
    ("repetition_penalty", 0.01, 2.0),
)
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
    tokens neither can be sampled. `grammar`: what the text must follow, as `sampling.grammar` makes
    it; where nothing can follow, the sequence ends. `thinking_budget`: tokens of a thought, which
    begins with `thought_begin_ids` or, without any, with the sequence; then `thought_end_ids` close
    it, whatever the model says.

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
    grammar: str | None = None
    thinking_budget: int | None = None
    thought_begin_ids: list[int] = field(default_factory=list)
    thought_end_ids: list[int] = field(default_factory=list)
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
        return self.temperature < _COLDEST or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _wrong(name: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {got}")

"""Samples tokens from logits, for a whole batch at once. N rows, V vocabulary size.

The only randomness of a token is one uniform number, which depends only on (seed, position).
Therefore a request gives the same text alone, in a batch, and after it was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...kernels import ops
from ...kernels.staging import HostCopy, is_at_hand, to_device
from ...kernels.step_parts import DRAW, Choosing
from ..core.ahead import Sampler
from ..core.generation import TokenLogprob
from .logits_processors import adjust, ban_by_grammar
from .logprobs import gather_logprobs, read_logprobs

NO_TOKEN = -1  # The token chosen from logits that are not finite.
# Added to a seed for the next draw. It is odd and far from neighbouring seeds.
_NEXT_SEED = 0xD1B54A32D192ED03
_NO_TOP_K = np.iinfo(np.int32).max  # More than any vocabulary has.
_STEPS = 2.0**24  # Count of evenly spaced numbers that float32 holds in [0, 1).


class Sampled(NamedTuple):
    """The next token of a request, or `NO_TOKEN`, and its log-probability if requested."""

    token: int
    logprob: TokenLogprob | None


class KnownSamples:
    """The next tokens of a step on the host, each a token or `NO_TOKEN`.

    Reading them needs no call of torch.
    """

    def __init__(self, chosen: list[int]) -> None:
        self._chosen = chosen

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens, as in `Samples`."""
        return torch.tensor(self._chosen).clamp_min(0)

    def read(self) -> list[Sampled]:
        """Return one result per request."""
        return [Sampled(token, None) for token in self._chosen]


class Samples:
    """The next tokens of a step's requests."""

    def __init__(
        self,
        chosen: torch.Tensor,
        asking: list[tuple[int, int]],
        logprobs: list[torch.Tensor],
    ) -> None:
        """Keep the results of a step.

        Args:
            chosen: A token or `NO_TOKEN` per row.
            asking: (row, number of alternatives) of rows that want log-probabilities.
            logprobs: The tensors that were gathered for these rows.
        """
        self.chosen = chosen
        self._asking = asking
        self._copy = HostCopy([chosen, *logprobs])

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Tokens [N] int64 on the device, for a next step that does not wait for this one."""
        return self.chosen.clamp_min(0)

    def read(self) -> list[Sampled]:
        """Wait for the device and return one result per request."""
        on_host, *logprobs = self._copy.wait()
        tokens = on_host.tolist()
        results = [Sampled(token, None) for token in tokens]
        if self._asking:
            rows, top_counts = zip(*self._asking, strict=True)
            for row, logprob in zip(
                rows,
                read_logprobs(logprobs, [tokens[row] for row in rows], top_counts),
                strict=True,
            ):
                results[row] = Sampled(tokens[row], logprob)
        return results


def sample(
    logits: torch.Tensor, requests: list[Sampler], sampled: torch.Tensor | None = None
) -> Samples:
    """Choose the next token of each request from its row of logits [N, V] float32.

    The logits may be overwritten. `sampled` int64 are the tokens of the step in flight, which
    replace placeholders.
    """
    asking = [
        (row, request.params.logprobs)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    ]
    if asking:
        # Log-probabilities are the model's own, before processors change the logits.
        (index,) = to_device([np.array([row for row, _ in asking])], logits.device)
        raw = logits.index_select(0, index)
    # Tokens of these rows are drawn before the grammar's mask is known. Filters need the mask
    # first, because they compare only allowed tokens.
    unmasked = [
        row
        for row, request in enumerate(requests)
        if request.grammar is not None and _kind(request) is not _sample_filtered
    ]
    unmasked = unmasked if is_at_hand(logits) else []
    adjust(logits, requests, sampled, unmasked)
    chosen = choose(logits, requests)
    if unmasked:
        _draw_again(logits, requests, chosen, unmasked)
    logprobs: list[torch.Tensor] = []
    if asking:
        widest = max(top for _, top in asking)
        tokens = chosen.index_select(0, index).clamp_min(0)
        logprobs = gather_logprobs(raw, tokens, widest)
    return Samples(chosen, asking, logprobs)


def _draw_again(
    logits: torch.Tensor, requests: list[Sampler], chosen: torch.Tensor, rows: list[int]
) -> None:
    """Draw again for rows whose token the grammar refuses, among allowed tokens (rejection
    sampling).

    The distribution is the same as if the other tokens had been banned from the start. Most tokens
    need no mask, which costs ten times as much as a check of one token. Changes `chosen` [N].
    """
    tokens = chosen.tolist()
    refused = [
        row
        for row in rows
        if tokens[row] != NO_TOKEN and not _may_follow(requests[row], tokens[row])
    ]
    if not refused:
        return
    again = [requests[row] for row in refused]
    (index,) = to_device([np.array(refused)], logits.device)
    allowed = logits.index_select(0, index)
    ban_by_grammar(allowed, again)
    second = choose(allowed, again, draw=1)
    # Keep a token that the mask allows after all. Otherwise it would be drawn too seldom.
    first = chosen.index_select(0, index)
    stays = allowed.gather(1, first[:, None])[:, 0] > -torch.inf
    chosen.index_copy_(0, index, torch.where(stays, first, second))


def _may_follow(request: Sampler, token: int) -> bool:
    matcher = request.grammar
    return matcher is None or (matcher.fault is None and matcher.takes([token], request.ahead))


def choose(logits: torch.Tensor, requests: list[Sampler], draw: int = 0) -> torch.Tensor:
    """Return token ids [N], or `NO_TOKEN`. `draw` counts the draws for the same position.

    The cost and the result of a row depend only on its own parameters.
    """
    kinds = [_kind(request) for request in requests]
    present = set(kinds)
    if len(present) == 1:
        return kinds[0](logits, requests, draw)
    chosen = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    for kind in present:
        rows = [row for row, own in enumerate(kinds) if own is kind]
        (index,) = to_device([np.array(rows)], logits.device)
        chosen.index_copy_(
            0, index, kind(logits.index_select(0, index), [requests[row] for row in rows], draw)
        )
    return chosen


def draws_of(requests: Sequence[Sampler]) -> npt.NDArray[np.void] | None:
    """Return the parameters of `choose` for kernels that sample within a step.

    None means that each request gets its likeliest token.
    """
    if all(request.params.greedy for request in requests):
        return None
    draws = np.empty(len(requests), DRAW)
    draws["seed"] = _seeds_of(requests, 0)
    draws["top_k"] = [r.params.top_k if r.params.top_k > 0 else _NO_TOP_K for r in requests]
    for name in ("temperature", "top_p", "min_p"):
        draws[name] = _column(requests, name)
    draws["choosing"] = [_CHOOSING[_kind(request)] for request in requests]
    return draws


def _kind(request: Sampler) -> Callable[[torch.Tensor, list[Sampler], int], torch.Tensor]:
    params = request.params
    if params.greedy:
        return _take_likeliest
    return (
        _sample_plain
        if params.top_k == -1 and params.top_p == 1.0 and params.min_p == 0.0
        else _sample_filtered
    )


def _take_likeliest(logits: torch.Tensor, requests: list[Sampler], draw: int) -> torch.Tensor:
    tokens = ops.argmax(logits)
    # `argmax` treats NaN as the largest value.
    return _where_finite(tokens, logits.gather(1, tokens[:, None])[:, 0])


def _sample_plain(logits: torch.Tensor, requests: list[Sampler], draw: int) -> torch.Tensor:
    temperature, halves = to_device(
        [_column(requests, "temperature"), _split(_numbers_of(requests, draw))], logits.device
    )
    return ops.sample_plain(logits, temperature, halves)


def _sample_filtered(logits: torch.Tensor, requests: list[Sampler], draw: int) -> torch.Tensor:
    """Apply temperature, then keep tokens that pass min-p, top-k and top-p (after top-k).

    Each filter keeps at least the likeliest token.
    """
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p = to_device(
        [
            _column(requests, "temperature"),
            np.array([r.params.top_k if r.params.top_k > 0 else vocab for r in requests]),
            _column(requests, "top_p"),
            _column(requests, "min_p"),
        ],
        logits.device,
    )
    probs = ops.softmax(logits, temperature)
    # One number per request, in the dtype that the device's `sample_filtered` takes.
    numbers = _numbers_of(requests, draw)
    as_double = ops.uniform_dtype(logits.device.type) == np.float64
    (uniform_numbers,) = to_device([numbers if as_double else _split(numbers)[:, 0]], logits.device)
    tokens = ops.sample_filtered(probs, top_k, top_p, min_p, uniform_numbers)
    return _where_finite(tokens, probs[:, 0])


_CHOOSING: dict[Callable[[torch.Tensor, list[Sampler], int], torch.Tensor], Choosing] = {
    _take_likeliest: Choosing.LIKELIEST,
    _sample_plain: Choosing.PLAIN,
    _sample_filtered: Choosing.FILTERED,
}


def _where_finite(tokens: torch.Tensor, witness: torch.Tensor) -> torch.Tensor:
    """Return the tokens [N], with `NO_TOKEN` where the witness [N] is not finite.

    If one logit of a row is NaN, softmax makes the whole row NaN.
    """
    return torch.where(witness.isfinite(), tokens, NO_TOKEN)


def _column(requests: Sequence[Sampler], name: str) -> npt.NDArray[np.float32]:
    return np.array([getattr(r.params, name) for r in requests], np.float32)


def _numbers_of(requests: Sequence[Sampler], draw: int) -> npt.NDArray[np.float64]:
    positions = np.array([r.num_tokens for r in requests], np.uint64)
    return uniform(_seeds_of(requests, draw), positions)


def _seeds_of(requests: Sequence[Sampler], draw: int) -> npt.NDArray[np.uint64]:
    # Another draw uses another seed.
    return np.array(
        [(r.seed + draw * _NEXT_SEED) & 0xFFFFFFFFFFFFFFFF for r in requests], np.uint64
    )


def _split(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Split numbers [N] in [0, 1) into two float32 each [N, 2]: their first and next 24 bits."""
    scaled = numbers * _STEPS
    first = np.floor(scaled)
    return np.ascontiguousarray(
        np.stack((first, np.floor((scaled - first) * _STEPS)), 1) / _STEPS, np.float32
    )


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) that depend only on (seed, position).

    They are SplitMix64's output mix (Steele et al., OOPSLA 2014), applied twice.
    """
    return (_mix(_mix(seeds) + positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

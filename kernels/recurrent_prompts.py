"""Prompts through layers with a recurrent state, in chunks by products of matrices, in plain torch.
`ops` uses these functions if the platform has no kernel.

Shapes: T tokens of the step, H heads of P numbers, N numbers of a state for each of these, G groups
of heads, K columns of a convolution over C channels; n chunks of Q tokens. Only the rows of
`prompts` are read and written. The states of prompts lie at their slots and are changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .recurrent_steps import (
    DeltaWeights,
    Mamba2Weights,
    ScanWeights,
    States,
    delta_inputs,
    mamba2_inputs,
    put,
    scan_inputs,
)
from .state_plan import CHUNK, Prompts

_ON_CPU = 2  # Chunks that a CPU computes together.
_BLOCK = 16  # Tokens of a chunk whose states a selective scan computes at once.
# About how many numbers of states a selective scan holds at once.
_NUMBERS_ON_CPU, _NUMBERS = 2**21, 2**26
# Most chunks that are computed together if each row of a state has its own decay. Products of all
# these rows are in memory meanwhile.
_BY_ROWS = 16
# In that case, decays between tokens are computed pair by pair within blocks of this many tokens.
_NEAR = 16


def conv_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> None:
    """Write `recurrent.causal_conv` of x [T, C] into out [T, C]."""
    result = _convolved(x.index_select(0, prompts.rows), weight, bias, states, prompts)
    out.index_copy_(0, prompts.rows, result.to(out.dtype))


def mamba2_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    """Write `recurrent.mamba2` of x [T, C] and dt [T, H] into out [T, H * P]."""
    x, dt = (each.index_select(0, prompts.rows) for each in (x, dt))
    conv = _convolved(x, weights.conv, weights.conv_bias, states.conv, prompts)
    x, b, c, dt = mamba2_inputs(conv, dt, weights, states)
    y = _ssd_chunks(x, dt, weights.a, b, c, states.recurrent, prompts)
    y = torch.addcmul(y, x, weights.d[:, None]).flatten(1)
    out.index_copy_(0, prompts.rows, y.to(out.dtype))


def gated_delta_prompts(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    """Write `recurrent.gated_delta_net` of x [T, C], b [T, H], a [T, H * D] into out [T, H * P]."""
    x, b, a = (each.index_select(0, prompts.rows) for each in (x, b, a))
    conv = _convolved(x, weights.conv, None, states.conv, prompts)
    inputs = delta_inputs(conv, b, a, weights, states)
    y = _delta_chunks(*inputs, states.recurrent, prompts).flatten(1)
    out.index_copy_(0, prompts.rows, y.to(out.dtype))


def selective_scan_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    out: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> None:
    """Write `recurrent.selective_scan` of x, dt [T, C] and b, c [T, G * N] into out [T, C]."""
    x, dt, b, c = (each.index_select(0, prompts.rows) for each in (x, dt, b, c))
    inputs = scan_inputs(x, dt, b, c, weights, states)
    y = torch.addcmul(_scan_blocks(*inputs, weights.a, states, prompts), inputs[0], weights.d)
    out.index_copy_(0, prompts.rows, y.to(out.dtype))


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    prompts: Prompts,
) -> torch.Tensor:
    """Return the convolution of the prompts' tokens x [tokens, C]: [tokens, C] float32."""
    taps = prompts.taps(weight.shape[1])
    old = states.index_select(0, prompts.slots)
    rows, columns = torch.cat((old.flatten(0, 1), x)), weight.t()
    wide = rows.float()
    if len(prompts.lens) == 1:
        read = [wide[place : place + len(x)] for place in range(len(columns))]
    else:
        read = [wide.index_select(0, each) for each in taps.read]
    result = read[0] * columns[0]
    for each, column in zip(read[1:], columns[1:], strict=True):
        result.addcmul_(each, column)
    put(states, prompts.slots, rows.index_select(0, taps.kept).view(old.shape))
    return result if bias is None else result + bias


def _ssd_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> torch.Tensor:
    """Return the output of Mamba 2 [tokens, H, P] for x [tokens, H, P], dt [tokens, H] and b, c
    [tokens, G, N], and update the states.

    Within a chunk tokens see one another as in attention, with products of decays in place of a
    softmax (section 6 of the paper).
    """
    groups, numbers = b.shape[1:]
    kept, found = states.index_select(0, prompts.slots), []
    for tokens, valid, owners in _parts(prompts):
        n = len(owners)
        steps = dt[tokens] * valid[..., None]
        decay = (steps * a).transpose(1, 2).cumsum(-1)
        # [n, H, Q, P]; [n, G, Q, N]
        values = (x[tokens] * steps[..., None]).transpose(1, 2)
        keys, queries = b[tokens].transpose(1, 2), c[tokens].transpose(1, 2)
        scores = (queries @ keys.mT).repeat_interleave(x.shape[1] // groups, 1)
        y = _see_earlier(scores.mul_(_pairwise(decay)), values).transpose(1, 2)
        # Heads of a group share b and c, so they are rows of one product.
        left = values * (decay[..., -1:] - decay).exp()[..., None]
        added = (left.mT.reshape(n, groups, -1, CHUNK) @ keys).view(n, *states.shape[1:])
        lasting = decay[..., -1].exp()[..., None, None]
        before = torch.empty_like(added)
        for chunk, owner in enumerate(owners):
            before[chunk] = kept[owner]
            torch.addcmul(added[chunk], lasting[chunk], before[chunk], out=kept[owner])
        seen = queries @ before.view(n, groups, -1, numbers).mT
        seen = seen.transpose(1, 2).reshape(y.shape)
        found.append(torch.addcmul(y, seen, decay.exp().transpose(1, 2)[..., None]))
    put(states, prompts.slots, kept)
    return torch.cat(found).flatten(0, 1).index_select(0, prompts.places)


def _scan_blocks(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> torch.Tensor:
    """Return the output of Mamba [tokens, C] for x, dt [tokens, C] and b, c [tokens, G, N], and
    update the states.

    Each number of a state has its own decay, so no product of matrices computes the states. Within
    a block, each token adds the state of the token 1, 2, 4 and 8 places before it. Then it holds
    what all tokens of the block up to itself have written.
    """
    kept, found = states.index_select(0, prompts.slots), []
    most = _NUMBERS_ON_CPU if x.device.type == "cpu" else _NUMBERS
    together = max(1, most // (_BLOCK * a.numel()))
    blocks, valid = prompts.tokens.view(-1, _BLOCK), prompts.valid.view(-1, _BLOCK, 1)
    owners = [owner for owner in prompts.owners for _ in range(CHUNK // _BLOCK)]
    for begin in range(0, len(owners), together):
        part = slice(begin, begin + together)
        tokens = blocks[part]
        steps = dt[tokens] * valid[part]
        # [n, Q, C, N]
        left = (steps[..., None] * a).exp_()
        state = torch.empty_like(left)
        # [n, Q, G, C / G, ..]
        by_group = state.view(*tokens.shape, b.shape[1], -1, b.shape[2])
        written = (steps * x[tokens]).view(by_group.shape[:-1])
        torch.mul(written[..., None], b[tokens].unsqueeze(3), out=by_group)
        reach = 1
        while reach < _BLOCK:
            state[:, reach:] += left[:, reach:] * state[:, :-reach]
            left[:, reach:] = left[:, reach:] * left[:, :-reach]
            reach *= 2
        before = torch.empty_like(state[:, :1])
        for block, owner in enumerate(owners[part]):
            before[block] = kept[owner]
            kept[owner] = torch.addcmul(state[block, -1], left[block, -1], kept[owner])
        state.addcmul_(left, before)
        found.append((by_group @ c[tokens][..., None]).flatten(2))
    put(states, prompts.slots, kept)
    return torch.cat(found).flatten(0, 1).index_select(0, prompts.places)


def _delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> torch.Tensor:
    """Return the output of the gated delta rule [tokens, H, P], and update the states.

    q and k are [tokens, G, N], v [tokens, H, P], decay [tokens, H, D] and beta [tokens, H]. What a
    token writes depends on what the tokens before it wrote. For each chunk this is a triangular
    system (section 3 of the paper).
    """
    times, size = v.shape[1] // q.shape[1], v.shape[2]
    by_rows = decay.shape[2] > 1
    kept, found = states.index_select(0, prompts.slots), []
    for tokens, valid, owners in _parts(prompts, _BY_ROWS if by_rows else None):
        # [n, H, Q, D]
        decays = (decay[tokens] * valid[..., None, None]).transpose(1, 2)
        sums = decays.cumsum(-2)
        rates = (beta[tokens] * valid[..., None]).transpose(1, 2)[..., None]
        queries, keys = (each[tokens].transpose(1, 2) for each in (q, k))
        # [n, H, Q, Q]
        if by_rows:
            asking, asked = (each.repeat_interleave(times, 1) for each in (queries, keys))
            attends, system = _decayed_products(asking, asked, decays, sums)
            system = system.mul_(rates).tril_()
        else:
            pairwise = _pairwise(sums[..., 0])
            attends = (queries @ keys.mT).repeat_interleave(times, 1).mul_(pairwise)
            system = (keys @ keys.mT).repeat_interleave(times, 1).mul_(pairwise.mul_(rates)).tril_()
        # [n, H, Q, N] and [n, H, Q, P]
        queries, keys = (each.repeat_interleave(times, 1) for each in (queries, keys))
        grown = sums.exp()
        wanted = torch.cat((v[tokens].transpose(1, 2), keys * grown), dim=-1).mul_(rates)
        spoilt = _spoilt(system) + _spoilt(wanted)
        for each in (system, wanted):
            each.nan_to_num_(0.0, 0.0, 0.0)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        written, read = solved.add_(spoilt).tensor_split([size], dim=-1)
        queries = queries * grown
        left = (keys * (sums[..., -1:, :] - sums).exp()).mT
        lasting = sums[..., -1, :].exp()[..., None]
        y = torch.empty_like(written)
        for chunk, owner in enumerate(owners):
            state = kept[owner]
            new = written[chunk] - read[chunk] @ state
            torch.add(queries[chunk] @ state, _see_earlier(attends[chunk], new), out=y[chunk])
            torch.baddbmm(lasting[chunk] * state, left[chunk], new, out=state)
        found.append(y.transpose(1, 2))
    put(states, prompts.slots, kept)
    return torch.cat(found).flatten(0, 1).index_select(0, prompts.places)


def _decayed_products(
    queries: torch.Tensor, keys: torch.Tensor, decays: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products of queries [n, H, Q, N] with keys, and of keys with keys, [n, H, Q, Q].

    In entry (i, j) each of the N numbers has decayed from token j to token i. Entries with j > i
    are undefined. `decays` is [n, H, Q, N], and `sums` holds its running sums. Between blocks of
    tokens, the entries are products of matrices: the left factor decays from the beginning of the
    block, the right one up to there.
    """
    products = [rows.new_zeros(*rows.shape[:-1], CHUNK) for rows in (queries, keys)]
    for begin in range(0, CHUNK, _NEAR):
        block = slice(begin, begin + _NEAR)
        # Running sums of one block are smaller, so their differences are more accurate.
        own, before_it = decays[:, :, block].cumsum(-2), sums[:, :, begin - 1 : begin]
        # [n, H, tokens, tokens, N]
        decayed = keys[:, :, None, block] * _pairwise(own.mT).permute(0, 1, 3, 4, 2)
        before = keys[:, :, :begin] * (before_it - sums[:, :, :begin]).exp()
        faded = own.exp()
        for rows, result in zip((queries, keys), products, strict=True):
            rows = rows[:, :, block]
            result[..., block, :begin] = (rows * faded) @ before.mT
            result[..., block, block] = (decayed @ rows[..., None]).squeeze(-1)
    attends, among_keys = products
    return attends, among_keys


def _parts(
    prompts: Prompts, most: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Yield tokens, `valid` and owners of the chunks that are computed together: few on a CPU, so
    that they fit its caches, elsewhere at most `most`.
    """
    count = len(prompts.owners)
    together = _ON_CPU if prompts.tokens.device.type == "cpu" else most or count
    for begin in range(0, count, together):
        part = slice(begin, begin + together)
        yield prompts.tokens[part], prompts.valid[part], prompts.owners[part]


def _pairwise(decay: torch.Tensor) -> torch.Tensor:
    """Return what is left of token j at token i, [n, H, Q, Q], from running sums of decays [n, H,
    Q]. Entries with j > i are undefined.
    """
    return (decay[..., :, None] - decay[..., None, :]).exp_()


def _see_earlier(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum over each token and the tokens before it of weights [.., Q, Q] times values
    [.., Q, P]. `weights` is overwritten.

    NaN and infinity are added after the product. Within it, 0 times such a number would spoil
    earlier tokens, which other requests may share.
    """
    return (weights.tril_() @ values.nan_to_num(0.0, 0.0, 0.0)).add_(_spoilt(values))


def _spoilt(rows: torch.Tensor) -> torch.Tensor:
    """Return [.., Q, 1] for rows [.., Q, P]: 0, or NaN from the first row on that has a number that
    is not finite.
    """
    return (rows * 0.0).sum(-1, keepdim=True).cumsum(-2)

"""Converts texts, token ids and pairs of texts to inputs of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers

from ...runtime.core.pooling_messages import INPUTS_PER_REQUEST, NO_ADAPTER, PoolRequest
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.errors import InvalidRequest
from ..core.limits import Limits, check_text

_SLICE = 2**15  # Characters of a long text whose tokens are counted at once.
_CUT = 16  # Upper bound of the tokens that cutting a text in two adds.


class Input(NamedTuple):
    """One text, or a pair of texts.

    `token_ids` is int32. `first` is the number of tokens of the first text, with its special
    tokens. `adapter` is the number of the model's adapter.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    first: int
    adapter: int = NO_ADAPTER


class InputEncoder:
    """Makes inputs of at most `limits.context_length` tokens.

    `lower_case` and `tells_pairs` are those of the model's `PoolingFolder`. Texts cannot contain
    special tokens, such as the separator of a pair. All methods raise `InvalidRequest` with the
    name of the parameter.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, *, lower_case: bool, tells_pairs: bool
    ) -> None:
        self._backend = tokenizer.backend
        self._backend.encode_special_tokens = True
        self._limits, self._lower_case, self._tells_pairs = limits, lower_case, tells_pairs

    def texts(
        self, texts: Sequence[str], names: Sequence[str], *, cut: int | None, special: bool = True
    ) -> list[Input]:
        """Encode texts.

        `names` are the parameters of the texts. `cut` is the number of tokens to keep of each text;
        -1: the model's maximum; None: longer texts are refused.
        """
        self._check_cut(cut)
        found = []
        for text, name in zip(texts, names, strict=True):
            encoding = self._encode(text, name, cut)
            if cut is not None:
                room = self._most(cut) - self._backend.num_special_tokens_to_add(False) * special
                encoding = _first(encoding, max(0, room))
            whole = self._backend.post_process(encoding, None, special)
            found.append(self._checked(whole.ids, len(whole.ids), name))
        return found

    def token_ids(self, ids: list[int], name: str, *, cut: int | None) -> Input:
        """Return the input of a client's token ids, which are used unchanged."""
        self._check_cut(cut)
        self._limits.check_prompt(ids, name)
        if cut is not None:
            ids = ids[: self._most(cut)]
        return self._checked(ids, len(ids), name)

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        names: Sequence[tuple[str, str]],
        *,
        cut: int | None,
    ) -> list[Input]:
        """Encode each pair as one input. With `cut`, the longer text is truncated first."""
        self._check_cut(cut)
        known: dict[str, tokenizers.Encoding] = {}
        found = []
        for (first, second), (first_name, second_name) in zip(pairs, names, strict=True):
            if first not in known:
                known = {first: self._encode(first, first_name, cut)}
            one, two = known[first], self._encode(second, second_name, cut)
            if cut is not None:
                room = max(0, self._most(cut) - self._backend.num_special_tokens_to_add(True))
                # A long text is truncated once for all its pairs, which never keep more.
                known[first] = one = _first(one, room)
                keep = _shares(len(one.ids), len(two.ids), room)
                one, two = _first(one, keep[0]), _first(two, keep[1])
            whole = self._backend.post_process(one, two, True)
            kinds = whole.type_ids
            length = kinds.index(1) if self._tells_pairs and 1 in kinds else len(kinds)
            found.append(self._checked(whole.ids, length, second_name, pair=True))
        return found

    def _encode(self, text: str, name: str, cut: int | None) -> tokenizers.Encoding:
        check_text(len(text), name)
        text = text.lower() if self._lower_case else text
        if cut is None and len(text) > _SLICE:
            self._count(text, name)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0]

    def _count(self, text: str, name: str) -> None:
        """Refuse a text that is far too long after encoding only a part of it."""
        tokens = 0
        for begin in range(0, len(text), _SLICE):
            part = self._backend.encode_batch_fast(
                [text[begin : begin + _SLICE]], add_special_tokens=False
            )
            tokens += max(0, len(part[0].ids) - _CUT)
            if tokens > self._limits.context_length:
                raise self._too_long(f"{tokens} or more", name)

    def _checked(self, ids: list[int], first: int, name: str, *, pair: bool = False) -> Input:
        if not ids:
            raise InvalidRequest(
                f"{name}: the text has no tokens; send some text.", param=name, code="invalid_value"
            )
        if len(ids) > self._limits.context_length:
            raise self._too_long(str(len(ids)), name, pair=pair)
        return Input(np.array(ids, np.int32), first)

    def _most(self, cut: int) -> int:
        return self._limits.context_length if cut == -1 else cut

    def _check_cut(self, cut: int | None) -> None:
        if cut is not None and not (cut == -1 or 1 <= cut <= self._limits.context_length):
            raise InvalidRequest(
                "truncate_prompt_tokens: must lie between 1 and the model's maximum of "
                f"{self._limits.context_length} tokens, or be -1 for the maximum; got {cut}.",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )

    def _too_long(self, tokens: str, name: str, *, pair: bool = False) -> InvalidRequest:
        has = "and the other text of its pair have" if pair else "has"
        message = (
            f"This model takes texts of up to {self._limits.context_length} tokens, but {name} "
            f"{has} {tokens}. Shorten it, or send truncate_prompt_tokens: -1."
        )
        return InvalidRequest(message, param=name, code="context_length_exceeded")


def _shares(one: int, two: int, room: int) -> tuple[int, int]:
    """Return how many tokens two texts keep so that `room` suffices.

    The longer text is truncated first, as by `longest_first` of tokenizers.
    """
    if one + two <= room:
        return one, two
    half = room // 2
    if one <= half:
        return one, room - one
    if two <= room - half:
        return room - two, two
    return half, room - half


def _first(encoding: tokenizers.Encoding, most: int) -> tokenizers.Encoding:
    """Return the encoding of the first `most` tokens.

    `Encoding.truncate` keeps the rest as overflow, and post-processors combine all overflows of a
    pair: 20 kB become gigabytes. A new encoding is therefore set by the interface of pickle.
    """
    if len(encoding) <= most:
        return encoding
    nothing = [0] * most
    found = tokenizers.Encoding()
    found.__setstate__(
        msgspec.json.encode(
            {
                "ids": encoding.ids[:most],
                "type_ids": nothing,
                "tokens": [""] * most,
                "words": [None] * most,
                "offsets": [(0, 0)] * most,
                "special_tokens_mask": nothing,
                "attention_mask": [1] * most,
                "overflowing": [],
                "sequence_ranges": {},
            }
        )
    )
    return found


def pool_requests(rid: str, inputs: Sequence[Input]) -> list[PoolRequest]:
    """Split inputs into requests of at most `INPUTS_PER_REQUEST`, in order."""
    return [
        PoolRequest(
            rid=f"{rid}-{begin}",
            token_ids=np.concatenate([each.token_ids for each in part]).astype("<i4").tobytes(),
            lengths=[len(each.token_ids) for each in part],
            firsts=[each.first for each in part],
            adapters=[each.adapter for each in part],
        )
        for begin in range(0, len(inputs), INPUTS_PER_REQUEST)
        for part in (inputs[begin : begin + INPUTS_PER_REQUEST],)
    ]

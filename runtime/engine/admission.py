"""Checks a message that asks for a text, and makes the request of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..core.generation import GenerateRequest
from ..core.logits_processor import MakesProcessors
from ..core.request import Request
from ..lora.adapter import DISABLED, AdapterFault
from ..lora.store import AdapterStore
from ..multimodal.encodings import Encodings
from ..sampling.grammar_cache import Grammars
from ..sampling.logits_processors import processors_for, with_plug_ins
from ..sampling.plug_ins import PlugIns


class Model(Protocol):
    """What a request must suit."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    adapters: AdapterStore | None
    images: Encodings | None


def admit(
    message: GenerateRequest,
    model: Model,
    limit: int,
    grammars: Grammars | None,
    draw_seed: Callable[[], int],
    plug_ins: PlugIns | None = None,
) -> Request:
    """Return the request of a message.

    `limit` is the greatest length of prompt and output in tokens. `draw_seed` gives seeds for
    requests without one. Raise `ValueError` for a request that can never run, `GrammarFault` if
    its grammar cannot be compiled, and `AdapterFault` if its adapter is not loaded.
    """
    params, length = message.params, len(message.input_ids) + len(message.output_ids)
    if not message.input_ids:
        raise ValueError("the prompt is empty")
    if length > limit - (params.max_new_tokens > 0):
        raise ValueError(
            f"the prompt has {length} tokens, but at most {limit - 1} fit with room for an answer"
        )
    vocab = model.vocab_size
    for name, tokens in (("prompt", message.input_ids), ("prediction", message.prediction_ids)):
        if not all(0 <= token < vocab for token in tokens):
            raise ValueError(f"the {name} has a token id outside of 0 to {vocab - 1}")
    if not all(
        0 <= token < vocab
        for token in [*params.logit_bias, *params.stop_token_ids, *params.thought_end_ids]
    ):
        raise ValueError(
            f"logit_bias, stop_token_ids and thought_end_ids take token ids of 0 to {vocab - 1}"
        )
    if message.images:
        if model.images is None:
            raise ValueError("this engine takes no images")
        model.images.check(message.images, len(message.input_ids))
    ends = frozenset() if params.ignore_eos else model.eos_token_ids.union(message.eos_token_ids)
    if params.grammar is not None and grammars is None:
        raise ValueError("this engine has no grammars")
    make_processors: MakesProcessors = processors_for
    if plug_ins is not None:
        plug_ins.validate(params)
        make_processors = partial(with_plug_ins, plug_ins)
    request = Request(
        message,
        seed=draw_seed() if params.seed is None else params.seed,
        stop_ids=ends.union(params.stop_token_ids),
        max_tokens=min(limit, len(message.input_ids) + params.max_new_tokens),
        grammar=grammars.matcher(params.grammar) if params.grammar and grammars else None,
        make_processors=make_processors,
    )
    if model.images is not None:
        model.images.prepare(request)
    if message.adapter:
        if model.adapters is None:
            raise AdapterFault("adapters are off: start with --enable-lora", DISABLED)
        model.adapters.begin(message.adapter)
    return request

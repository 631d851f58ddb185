"""Builds the engine's requests from wire models, for every endpoint family."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.images import ImageInput
from ...runtime.core.sampling_params import SamplingParams
from ...runtime.tokenizer.output_processor import RequestState, TextOptions
from ..auth.accounts import allowed_priority, client_name, tenant
from ..core.errors import InvalidRequest
from ..core.limits import MAX_PROMPT_LOGPROBS, MAX_STREAMED_PROMPT_LOGPROBS
from ..core.schemas import SamplingFields
from .state import Serving

_NUMBERS = itertools.count()
# Parameters that have the same name in `SamplingFields` and `SamplingParams`.
_SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class WireNames(NamedTuple):
    """Names of parameters on the wire: of the prompt, and of those members of `SamplingParams` that
    have another name there.
    """

    prompt: str
    sampling: Mapping[str, str]


def build_requests(
    serving: Serving,
    fields: SamplingFields,
    prompt_ids: list[int],
    called: Sequence[str],
    *,
    names: WireNames,
    max_tokens: int | None,
    include_stop: bool,
    priority: int,
    arrival_time: float,
    belongs_to: frozenset[str],
    visible: frozenset[int] = frozenset(),
    prediction: Sequence[int] = (),
    adapter: AdapterInfo | None = None,
    images: Sequence[ImageInput] = (),
    keep: Sequence[tuple[int, float]] = (),
    affinity: str = "",
    **values: Any,
) -> list[RequestState]:
    """Return the samples of one prompt, one for each name in `called`. Raise `InvalidRequest`.

    Args:
        max_tokens: An upper limit, which a long prompt lowers. None is the server's default.
        visible, prediction, images, keep, affinity: See `TextOptions` and `RequestState`.
        values: Parameters whose names differ between families, by the names of `SamplingParams`.
    """
    # 1. The prompt and the token ids belong to the model's vocabulary, and the answer has room.
    limits = serving.limits
    limits.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    limits.check_token_ids(fields.logit_bias, "logit_bias")
    limits.check_prompt(prompt_ids, names.prompt)
    least = values.pop("min_new_tokens")
    most = max(serving.default_max_tokens, least) if max_tokens is None else max_tokens
    max_new_tokens = limits.completion_tokens(len(prompt_ids), most, names.prompt)

    # 2. Sampling parameters. Errors use the parameter's name on the wire.
    try:
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(least, max_new_tokens) if least <= most else least,
            **_sampling(serving, fields),
            stop_token_ids=sorted(set(fields.stop_token_ids)),
            ignore_eos=fields.ignore_eos,
            logit_bias=fields.logit_bias,
            **values,
        )
    except ValueError as error:
        raise _by_wire_names(str(error), names.sampling) from None

    # 3. The samples, which differ only by their seeds.
    skips = fields.skip_special_tokens
    text = TextOptions(
        stop=fields.stop, include_stop=include_stop, skip_special_tokens=skips, visible=visible
    )
    return [
        RequestState(
            # Names may be reused while the engine still sends outputs for the previous request.
            f"{name}#{next(_NUMBERS)}",
            prompt_ids,
            params
            if params.seed is None or sample == 0
            else dataclasses.replace(params, seed=params.seed + sample),
            serving.engine.tokenizer,
            text=text,
            priority=allowed_priority(priority),
            arrival_time=arrival_time,
            belongs_to=belongs_to,
            name=name,
            prediction_ids=prediction,
            tenant=tenant(fields.cache_salt, shared=serving.config.kv_share == "all"),
            adapter="" if adapter is None else adapter.identity,
            adapter_name="" if adapter is None else adapter.name,
            images=images,
            keep=keep,
            client=client_name(),
            affinity=affinity,
        )
        for sample, name in enumerate(called)
    ]


def _by_wire_names(message: str, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error of a message that begins with the name of a parameter."""
    param = message.partition(" ")[0]
    for name, wire_name in names.items():
        message = message.replace(name, wire_name)
    return InvalidRequest(f"{message}.", param=names.get(param, param), code="invalid_value")


def _sampling(serving: Serving, fields: SamplingFields) -> dict[str, Any]:
    """Return the request's sampling parameters, and the server's defaults for the others."""
    given = {name: getattr(fields, name) for name in _SAMPLED if name in fields.model_fields_set}
    if "top_k" in given:
        given["top_k"] = given["top_k"] or -1
    return {**serving.sampling, **given}


def check_prompt_logprobs(requests: Sequence[RequestState], param: str, *, streamed: bool) -> None:
    """Raise `InvalidRequest` if a request asks for too many log-probabilities of prompts.

    The limit is lower for streams, which the event loop writes. `param` is the parameter that asks
    for alternatives.
    """
    most = MAX_STREAMED_PROMPT_LOGPROBS if streamed else MAX_PROMPT_LOGPROBS
    count = 0
    for request in requests:
        if (top := request.params.prompt_logprobs) is not None:
            count += (1 + top) * (len(request.prompt_ids) - request.params.prompt_logprobs_start)
    if count > most:
        message = (
            f"{param}: {count} log-probabilities of prompts are asked for, samples counted, "
            f"more than {most}"
        )
        remedy = "leave out stream, " if streamed else ""
        raise InvalidRequest(
            f"{message}; {remedy}lower {param} or n, or send shorter prompts.",
            param=param,
            code="too_many_logprobs",
        )

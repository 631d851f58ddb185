"""`suffix` of completions: the text is written between the prompt and it."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.tokenizer.infill import find_infill
from ..core.errors import InvalidRequest
from ..serving.state import THREAD_FROM, Serving
from .protocol import CompletionRequest


async def with_suffix(
    serving: Serving, body: CompletionRequest, prompts: Sequence[list[int]]
) -> tuple[CompletionRequest, list[list[int]]]:
    """What is asked of the engine instead: the request with what ends such a text, and the prompts
    as the model takes them. Raises `InvalidRequest`.
    """
    infill = find_infill(serving.engine.tokenizer)
    if infill is None:
        raise InvalidRequest(
            "suffix: this model's tokenizer has no tokens for fill-in-the-middle; leave it out.",
            param="suffix",
            code="unsupported_parameter",
        )
    if len(body.suffix) >= THREAD_FROM:
        # One that does not fit the context is refused as soon as that is known.
        await serving.encode(body.suffix, add_special_tokens=False, param="suffix")
    behind = await serving.threads.run(infill.encode, body.suffix)
    stops = [*body.stop_token_ids, *infill.stop_token_ids]
    return (
        body.model_copy(update={"stop_token_ids": stops}),
        [infill.prompt(before, behind) for before in prompts],
    )

"""`suffix` of completions: the model writes the text between the prompt and the suffix."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.tokenizer.infill import find_infill
from ..core.errors import InvalidRequest
from ..serving.state import THREAD_FROM, Serving
from .requests import CompletionRequest


async def with_suffix(
    serving: Serving, body: CompletionRequest, prompts: Sequence[list[int]]
) -> tuple[CompletionRequest, list[list[int]]]:
    """Return the request and the prompts for fill-in-the-middle. Raise `InvalidRequest`.

    The request gets the tokens that end such a text. The prompts get the model's special tokens.
    """
    infill = find_infill(serving.engine.tokenizer)
    if infill is None:
        raise InvalidRequest(
            "suffix: this model's tokenizer has no tokens for fill-in-the-middle; leave it out.",
            param="suffix",
            code="unsupported_parameter",
        )
    if len(body.suffix) >= THREAD_FROM:
        # This raises early if the suffix does not fit the context.
        await serving.encode(body.suffix, add_special_tokens=False, param="suffix")
    behind = await serving.threads.run(infill.encode, body.suffix)
    stops = [*body.stop_token_ids, *infill.stop_token_ids]
    return (
        body.model_copy(update={"stop_token_ids": stops}),
        [infill.prompt(before, behind) for before in prompts],
    )

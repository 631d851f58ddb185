"""Prompts and sampling parameters of llama.cpp's endpoints become those of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...runtime.tokenizer.infill import find_infill
from ..core.errors import InvalidRequest
from ..core.limits import MAX_LOGIT_BIASES, check_text
from ..core.schemas import SamplingFields
from ..media.media import EncodedPrompt
from ..media.parts import image_of
from ..serving.state import Serving
from ..serving.structured import made_grammar
from .requests import MARK, GenerationBody, InfillBody, MediaPrompt, Prompt

# Parameters that have the same name in the body and in `SamplingFields`.
_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_TURN = 64  # Short texts that are tokenized before other requests have their turn.


async def encoded_prompts(serving: Serving, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    """Return the token ids and the images of each prompt. Only a text at the start of a prompt gets
    the special tokens.
    """
    found = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, MediaPrompt):
            found.append(await _with_images(serving, prompt, f"prompt[{index}].multimodal_data"))
        else:
            parts = [prompt] if isinstance(prompt, str) else prompt
            found.append(EncodedPrompt(await _joined(serving, parts)))
    return found


async def _with_images(serving: Serving, prompt: MediaPrompt, param: str) -> EncodedPrompt:
    parts = [image_of(image, f"{param}[{place}]") for place, image in enumerate(prompt.images)]
    media = serving.media_for(parts[0].param)
    media.check_count(parts)
    text = prompt.text.replace(MARK, (await media.ready()).placeholder)
    return await serving.encode_with_images(text, parts, "prompt", add_special_tokens=True)


async def _joined(serving: Serving, parts: Sequence[int | str]) -> list[int]:
    ids: list[int] = []
    texts = 0
    for place, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        elif part or place == 0:
            ids += await serving.encode(part, add_special_tokens=place == 0, param="prompt")
            serving.limits.check_length(len(ids), "prompt")
            texts += 1
            if texts % _TURN == 0:
                await asyncio.sleep(0)
    return ids


async def infill_prompt(serving: Serving, body: InfillBody) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt, and tokens that end the new text. Raise
    `InvalidRequest`.

    Files of `input_extra` come first. A model without tokens for files gets only their texts.
    """
    infill = find_infill(serving.engine.tokenizer)
    if infill is None:
        raise InvalidRequest(
            "input_suffix: this model's tokenizer has no tokens for fill-in-the-middle; send the "
            "text to POST /completion.",
            param="input_suffix",
            code="unsupported_parameter",
        )
    texts = [
        ("input_prefix", body.input_prefix),
        ("input_suffix", body.input_suffix),
        ("prompt", body.prompt),
        *(("input_extra", file.filename + file.text) for file in body.input_extra),
    ]
    check_text(sum(len(text) for _, text in texts), "input_extra")

    def encode() -> list[int]:
        tokenizer = infill.tokenizer

        def plain(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False) if text else []

        before: list[int] = []
        if infill.repository is not None and body.input_extra:
            repository, mark = infill.repository
            before += [repository, *plain("repository\n")]
            for file in body.input_extra:
                before += [mark, *plain(f"{file.filename}\n{file.text}\n")]
            before += [mark, *plain("filename\n")]
        else:
            for file in body.input_extra:
                before += plain(f"{file.text}\n")
        prompt = infill.prompt(plain(body.input_prefix), infill.encode(body.input_suffix))
        bos = tokenizer.encode("")[:1]
        start = bos if bos == [tokenizer.bos_token_id] else []
        return [*start, *before, *prompt, *plain(body.prompt)]

    ids = await serving.threads.run(encode)
    serving.limits.check_length(len(ids), "input_prefix")
    return ids, [*infill.stop_token_ids, *(infill.repository or ())]


async def sampling_of(
    serving: Serving, body: GenerationBody, stop_token_ids: Sequence[int] = ()
) -> SamplingFields:
    """Return the sampling parameters under the names that all endpoint families share.

    A parameter that the body lacks has the model's default, or llama.cpp's if the model has none.
    """
    given = body.model_fields_set | (GenerationBody.model_fields.keys() - serving.sampling.keys())
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME if name in given}
    if "temperature" in values:
        values["temperature"] = max(0.0, values["temperature"])
    if "top_k" in given:
        values["top_k"] = body.top_k if body.top_k > 0 else -1
    if "repeat_penalty" in body.model_fields_set or "repetition_penalty" not in serving.sampling:
        values["repetition_penalty"] = body.repeat_penalty
    return SamplingFields.model_construct(
        **values,
        stop=body.stop,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=body.ignore_eos,
        logit_bias=await _biases(serving, body.logit_bias),
    )


async def _biases(serving: Serving, pairs: Sequence[tuple[int | str, float]]) -> dict[int, float]:
    """Return the bias of each token. A text stands for all its tokens."""
    check_text(sum(len(token) for token, _ in pairs if isinstance(token, str)), "logit_bias")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        if isinstance(token, int):
            ids = [token]
        else:
            ids = await serving.encode(token, add_special_tokens=False, param=None)
        biases.update(dict.fromkeys(ids, bias))
        if len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias: the texts have more than {MAX_LOGIT_BIASES} tokens; send fewer.",
                param="logit_bias",
                code="logit_bias_size",
            )
    return biases


async def grammar_of(serving: Serving, body: GenerationBody) -> str | None:
    """Return the checked grammar of a body, or None if it has none. Raise `InvalidRequest`."""
    if body.grammar and body.json_schema is not None:
        raise InvalidRequest(
            "grammar and json_schema ask for two forms of one text; send one of them.",
            param="json_schema",
            code="invalid_value",
        )
    if body.grammar:
        return await made_grammar(serving, "grammar", "ebnf", body.grammar)
    if body.json_schema is not None:
        return await made_grammar(serving, "json_schema", "json", body.json_schema)
    return None

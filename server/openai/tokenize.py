"""`POST /v1/tokenize` and `/v1/detokenize`, also without `/v1`.

The answers hold the members of vLLM, SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest
from ..core.limits import check_text
from ..http.body import JsonRequest, JsonRoute
from ..serving.state import Serving, ServingDep, json_response
from .conversation import chat_prompt
from .requests import DetokenizeRequest, TokenizeRequest

MAX_TEXT_BYTES = 8 * 2**20  # Upper limit of the texts of one answer, which contains them thrice.
MAX_PIECES = 2**16  # Upper limit of the pieces of one answer, each of which is an object.
router = APIRouter(route_class=JsonRoute)
info_router = APIRouter()


class Piece(Answer):
    """A token with its text, or with its bytes if they are a part of a character."""

    id: int
    piece: str | list[int]


class Tokens(Answer):
    """`tokens` and `count` hold one entry per prompt if the prompt is a list."""

    tokens: list[int] | list[list[int]] | list[Piece]
    count: int | list[int]
    max_model_len: int


class DetokenizedText(Answer):
    """The text under the names of SGLang, vLLM and llama.cpp. Each is a list if `tokens` is a list
    of lists.
    """

    text: str | list[str]
    prompt: str | list[str]
    content: str | list[str]


class AddedToken(Answer):
    content: str
    special: bool


class TokenizerInfo(Answer):
    """`added_tokens_decoder` maps token ids to added tokens."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    model_max_length: int
    vocab_size: int
    added_tokens_decoder: dict[str, AddedToken]


_TOKENS = answers(Tokens, errors=BODY_ERRORS)
_TEXT = answers(DetokenizedText, errors=BODY_ERRORS)


@router.post("/v1/tokenize", responses=_TOKENS)
@router.post("/tokenize", responses=_TOKENS)
async def tokenize(body: TokenizeRequest, request: JsonRequest, serving: ServingDep) -> Response:
    """Tokenize a text or a conversation. A list of texts gives a list of lists."""
    serving.check_model(body.model)
    limit = serving.limits.context_length
    if body.content is not None:
        return json_response(await _content(serving, body, body.content))
    if body.prompt is None:
        ids, *_ = await chat_prompt(
            serving,
            body,
            size=request.size,
            add_special_tokens=bool(body.add_special_tokens),
            counting=True,
        )
        return json_response(Tokens(ids, len(ids), limit))
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    check_text(sum(map(len, texts)), "prompt")
    tokens = [
        await serving.encode(
            text, add_special_tokens=body.add_special_tokens is not False, param=None
        )
        for text in texts
    ]
    if isinstance(body.prompt, str):
        return json_response(Tokens(tokens[0], len(tokens[0]), limit))
    return json_response(Tokens(tokens, [len(ids) for ids in tokens], limit))


@router.post("/v1/detokenize", responses=_TEXT)
@router.post("/detokenize", responses=_TEXT)
async def detokenize(body: DetokenizeRequest, serving: ServingDep) -> Response:
    """Detokenize token ids. A list of lists gives a list of texts."""
    serving.check_model(body.model)
    several = bool(body.tokens) and isinstance(body.tokens[0], list)
    # The types of the ids were checked with the body. Checking millions of ids again is slow.
    lists = cast("list[list[int]]", body.tokens if several else [body.tokens])
    for ids in lists:
        serving.limits.check_token_ids(ids, "tokens")
    texts = await serving.threads.run(
        _decode, serving.engine.tokenizer, lists, skip_special_tokens=body.skip_special_tokens
    )
    whole = texts if several else texts[0]
    return json_response(DetokenizedText(whole, whole, whole))


@info_router.get("/tokenizer_info", responses=answers(TokenizerInfo, errors=(503,)))
async def tokenizer_info(serving: ServingDep) -> Response:
    """The members of tokenizer_config.json, under the names that vLLM's clients read."""
    tokenizer = serving.engine.tokenizer
    tokens = tokenizer.backend.get_added_tokens_decoder()
    ends = tokenizer.eos_token_ids
    return json_response(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            chat_template=tokenizer.chat_template,
            bos_token=_name(tokenizer, tokenizer.bos_token_id),
            eos_token=_name(tokenizer, ends[0] if ends else None),
            model_max_length=serving.limits.context_length,
            vocab_size=tokenizer.vocab_size,
            added_tokens_decoder={
                str(token_id): AddedToken(token.content, token.special)
                for token_id, token in tokens.items()
            },
        )
    )


async def _content(serving: Serving, body: TokenizeRequest, content: str) -> Tokens:
    """Return the tokens of `content`. Raise `InvalidRequest`."""
    tokenizer = serving.engine.tokenizer
    check_text(len(content), "content")
    if not body.parse_special:
        names = (tokenizer.backend.id_to_token(each) for each in tokenizer.special_token_ids)
        found = next((name for name in names if name and name in content), None)
        if found is not None:
            raise InvalidRequest(
                f"parse_special: content contains the special token {found!r}, which this server "
                "never reads as plain text; send true, or other text.",
                param="parse_special",
                code="unsupported_parameter",
            )
    ids = await serving.encode(content, add_special_tokens=body.add_special, param=None)
    limit = serving.limits.context_length
    if not body.with_pieces:
        return Tokens(ids, len(ids), limit)
    if len(ids) > MAX_PIECES:
        raise InvalidRequest(
            f"content: {len(ids)} tokens are more than the {MAX_PIECES} of an answer with pieces; "
            "send several requests.",
            param="content",
            code="text_too_long",
        )
    return Tokens([_piece(tokenizer, token_id) for token_id in ids], len(ids), limit)


def _piece(tokenizer: Tokenizer, token_id: int) -> Piece:
    content = tokenizer.token_bytes(token_id)
    try:
        return Piece(token_id, content.decode())
    except UnicodeDecodeError:
        return Piece(token_id, list(content))


def _name(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.backend.id_to_token(token_id)


def _decode(
    tokenizer: Tokenizer, lists: Sequence[list[int]], *, skip_special_tokens: bool
) -> list[str]:
    """Return the texts. Raise `InvalidRequest` if they are too long together."""
    size = sum(sum(map(len, map(tokenizer.token_bytes, ids))) for ids in lists)
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(
            f"tokens: the texts of these ids have {size} bytes, more than {MAX_TEXT_BYTES}; send "
            "them in several requests.",
            param="tokens",
            code="text_too_long",
        )
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]

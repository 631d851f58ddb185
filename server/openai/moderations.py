"""`POST /v1/moderations`, which this server does not offer."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ..core.answers import answers
from ..core.errors import NotImplementedHere

router = APIRouter()


@router.post("/v1/moderations", responses=answers(errors=(501,)))
async def moderate() -> Response:
    """Refuse to classify a text. Tell how to do it instead."""
    raise NotImplementedHere(
        "This server has no moderation model. Ask a model for guarding (Llama Guard, Granite "
        "Guardian, ShieldGemma) by POST /v1/chat/completions, or start a server for a classifier "
        "and send POST /classify.",
        code="moderation_not_supported",
    )

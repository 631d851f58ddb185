"""Valid bodies for what is stored: conversations and chat completions."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "Hi"}
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "compaction", "encrypted_content": "piecework-summary-1.SGk="},
]
# The first of each endpoint is minimal.
STORED_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/conversations": (
        {},
        {"items": _ITEMS, "metadata": {"a": "b"}},
        {"items": [{"type": "item_reference", "id": "msg_1"}]},
    ),
    "/v1/conversations/conv_1": ({"metadata": {"a": "b"}},),
    "/v1/conversations/conv_1/items": ({"items": _ITEMS},),
    "/v1/responses/compact": (
        {"model": "default", "input": "Hi"},
        {"model": "default", "input": _ITEMS, "instructions": "Be brief."},
        {"model": "default", "previous_response_id": "resp_1"},
    ),
    "/v1/chat/completions/chatcmpl-1": ({"metadata": {"a": "b"}},),
    "/v1/moderations": ({"input": "Hi"},),
}
STORED_GETS = (
    "/v1/conversations/conv_1", "/v1/conversations/conv_1/items?limit=0",
    "/v1/conversations/conv_%00/items?order=%ff&after=%00",
    "/v1/conversations/conv_1/items/..%2f..%2fetc",
    "/v1/chat/completions", "/v1/chat/completions?limit=1e9&after=x",
    "/v1/chat/completions?metadata[%00]=%ff&metadata[]=a&metadata=b&order=up",
    "/v1/chat/completions/chatcmpl-1", "/v1/chat/completions/chatcmpl-1/messages?limit=-1",
)  # fmt: skip

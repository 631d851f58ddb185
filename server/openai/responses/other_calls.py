"""Turns calls and outputs of all kinds of tools into calls of functions, which every model reads.

Clients send back calls of custom tools, of tools that OpenAI's models have learned
(`local_shell_call`), and of tools that OpenAI's servers ran (`mcp_call`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pydantic_core

from .items import Item
from .summary import read_summary
from .tools import CUSTOM_INPUT, PromptTool, function_names

logger = logging.getLogger(__name__)

_RESULTS = ("output", "outputs", "results", "error")  # Members that hold the output of a call.
# Members that are not arguments.
_ABOUT = {
    *("id", "type", "status", "call_id", "name", "namespace", "caller", "execution"),
    *("server_label", "approval_request_id", "result", *_RESULTS),
}


def plain_items(items: Iterable[Item], tools: Sequence[PromptTool]) -> list[Item]:
    """Return the items with all calls and outputs as those of functions with the names in `tools`.

    Items with neither a call nor an output are left out and logged.
    """
    plain: list[Item] = []
    left_out = set()
    items = list(items)
    asked = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    for item in items:
        match item["type"]:
            case "message" | "reasoning" | "function_call_output":
                plain.append(item)
            case "function_call":
                plain.append({**item, "name": _function_name(item, tools)})
            case "custom_tool_call":
                arguments = _json({CUSTOM_INPUT: item["input"]})
                plain.append(_call(item, _function_name(item, tools), arguments))
            case "compaction":
                plain.append(_summary(item))
            case "mcp_call" if isinstance(item.get("name"), str):
                plain += _other({**item, "name": _mcp_name(item, tools)})
            case "mcp_approval_response" if item.get("approve") is False and (
                request := asked.get(str(item.get("approval_request_id")))
            ):
                own = {**request, "call_id": request["id"]}
                name, arguments = _mcp_name(request, tools), str(request.get("arguments"))
                plain += [_call(own, name, arguments), _denial(item, request["id"])]
            case "mcp_list_tools" | "mcp_approval_request" | "mcp_approval_response":
                pass
            case "custom_tool_call_output":
                plain.append({**item, "type": "function_call_output"})
            case kind:
                found = list(_other(item))
                plain += found
                if not found:
                    left_out.add(kind)
    if left_out:
        logger.info(
            "/v1/responses: input items without a text are left out: %s",
            ", ".join(sorted(left_out)),
        )
    return plain


def _mcp_name(item: Item, tools: Sequence[PromptTool]) -> str:
    """Return the name under which the model calls the tool of an MCP server."""
    label = item.get("server_label")
    space = label if isinstance(label, str) else None
    return _function_name({"name": str(item.get("name")), "namespace": space}, tools)


def _denial(item: Item, call_id: str) -> Item:
    """Return the output of a call that the user did not approve."""
    reason = item.get("reason")
    text = f"The user did not approve this call{f': {reason}' if reason else '.'}"
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _summary(item: Item) -> Item:
    """Return the summary of a compaction item as a message of the assistant."""
    text = f"Summary of the conversation so far:\n{read_summary(item['encrypted_content'])}"
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content}


def _function_name(item: Item, tools: Sequence[PromptTool]) -> str:
    """Return the name under which the model calls the tool."""
    name: str = item["name"]
    namespace = item.get("namespace")
    for tool in tools:
        if tool.tool.name == name and tool.namespace == namespace:
            return tool.function_name
    return name if namespace is None else next(function_names(namespace, name))


def _other(item: Item) -> Iterator[Item]:
    """Yield a call, its output, or both, if the item has them."""
    kind, call_id = item["type"], item.get("call_id")
    if kind.endswith("_output") and call_id is not None:
        yield _result(item, call_id)
    elif kind.endswith("_call"):
        is_over = any(item.get(name) for name in _RESULTS)
        if call_id is None and not is_over:
            return
        name = item.get("name")
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            rest = {key: value for key, value in item.items() if key not in _ABOUT}
            arguments = _json(arguments if isinstance(arguments, dict) else rest)
        own = {**item, "call_id": call_id or item.get("id") or kind}
        yield _call(own, name if isinstance(name, str) else kind.removesuffix("_call"), arguments)
        if call_id is None:
            yield _result(item, own["call_id"])


def _call(item: Item, name: str, arguments: str) -> Item:
    call = {"type": "function_call", "call_id": item["call_id"], "name": name}
    return {**call, "arguments": arguments}


def _result(item: Item, call_id: str) -> Item:
    found = [item[name] for name in _RESULTS if item.get(name)]
    rest = {key: value for key, value in item.items() if key not in _ABOUT}
    value = found[0] if found else rest
    text = value if isinstance(value, str) else _json(value)
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _json(value: Any) -> str:
    return str(pydantic_core.to_json(value), "utf-8")

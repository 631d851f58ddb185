"""Which prefixes of a prompt `cache_control` marks.

A prefix ends where the first text after the marked tool or block begins. It therefore has what the
chat template writes between both. If no text follows, the prefix is the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..openai.kept_prefixes import KeptPrefixes, Marks
from .requests import CountTokensRequest, MessagesRequest, TextBlock, ToolResultBlock
from .to_chat import chat_options

HOUR = 3600.0
_SECONDS = {"5m": 300.0, "1h": HOUR}


def kept_prefixes(body: MessagesRequest) -> KeptPrefixes | None:
    """Return the prefixes that the request marks, None without marks.

    The last marked prefix of each time to live holds those before. At most two are returned.
    """
    # The number of a place counts the blocks before it. Templates write tools before the texts of
    # the system or after them.
    blocks = [*body.system, *(block for message in body.messages for block in message.content)]
    ends = dict[float, int]()
    for tool in body.tools:
        if (control := getattr(tool, "cache_control", None)) is not None:
            ends[_SECONDS[control.ttl]] = len(body.system)
    for place, block in enumerate(blocks, 1):
        for part in (block, *_results(block)):
            if (control := getattr(part, "cache_control", None)) is not None:
                ends[_SECONDS[control.ttl]] = max(place, ends.get(_SECONDS[control.ttl], 0))
    if body.cache_control is not None:
        ends[_SECONDS[body.cache_control.ttl]] = len(blocks)
    if not ends:
        return None
    texts = [place for place, block in enumerate(blocks) if _begins_with_text(block)]
    marks, seconds, places, whole = Marks(), list[float](), dict[int, str](), 0.0
    for ttl, end in sorted(ends.items(), reverse=True):
        following = next((place for place in texts if place >= end), None)
        if following is None:
            whole = max(whole, ttl)
            continue
        places[following] = places.get(following, "") + marks.mark(len(seconds))
        seconds.append(ttl)
    if not seconds:
        return KeptPrefixes(whole=whole)
    options = chat_options(_marked(body, places))
    return KeptPrefixes(seconds, whole, options, marks)


def _results(block: Any) -> Sequence[Any]:
    return block.content if isinstance(block, ToolResultBlock) else ()


def _begins_with_text(block: Any) -> bool:
    content = _results(block)
    return isinstance(content[0] if content else block, TextBlock)


def _marked(body: CountTokensRequest, places: dict[int, str]) -> CountTokensRequest:
    """Return the request with marks before the texts of some blocks."""
    numbers = iter(range(2**62))

    def marked(blocks: Sequence[Any]) -> Iterator[Any]:
        for block in blocks:
            mark = places.get(next(numbers))
            if mark is None:
                yield block
            elif isinstance(block, ToolResultBlock):
                first, *rest = block.content
                yield block.model_copy(update={"content": [_with(first, mark), *rest]})
            else:
                yield _with(block, mark)

    return body.model_copy(
        update={
            "system": list(marked(body.system)),
            "messages": [
                message.model_copy(update={"content": list(marked(message.content))})
                for message in body.messages
            ],
        }
    )


def _with(block: Any, mark: str) -> Any:
    return block.model_copy(update={"text": mark + block.text})

"""Tools of the Responses API: their wire models, and the functions that the model calls.

    functions = prompt_tools_of(body.tools)     # a function for each tool that the model may call
    names = by_function_name(functions)         # from the names of functions to the tools

Models know only functions. A tool of a namespace becomes a function whose name begins with the
namespace. A custom tool becomes a function with a text argument. Tools that OpenAI's servers run
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ...core.answers import Answer
from ...core.errors import UNION_TAG
from ...core.schemas import WireModel, disagreement, type_of
from ..tools import FUNCTION_NAME, MAX_TOOLS, FunctionDefinition
from .mcp_tools import McpFunction, McpTool

# Types of tools that OpenAI's servers run, or that OpenAI's models have learned.
_HOSTED = (
    r"^(web_search|file_search|code_interpreter|image_generation|computer|local_shell|shell"
    r"|tool_search|apply_patch|programmatic_tool_calling|x_search|memory)(_[a-z0-9_]+)?$"
)
_LONGEST_NAME = 64
CUSTOM_INPUT = "input"  # The argument of a custom tool's function.


class ResponseTool(Answer, kw_only=True):
    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class ResponseCustomTool(Answer, kw_only=True):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None
    format: dict[str, Any]


class ResponseNamespace(Answer, kw_only=True):
    type: Literal["namespace"] = "namespace"
    name: str
    description: str
    tools: Sequence[ResponseTool | ResponseCustomTool]


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    type: Literal["function"] = "function"

    def as_answer(self) -> ResponseTool:
        """Return the tool as a response repeats it."""
        return ResponseTool(
            name=self.name,
            description=self.description or None,
            parameters=self.parameters,
            strict=self.strict,
        )

    def function(self) -> dict[str, Any]:
        """Return the function as chats declare it."""
        return self.model_dump(exclude={"type"})


class CustomTool(WireModel):
    """A tool with a text argument.

    `format` is described to the model, but not enforced.
    """

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str = ""
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})

    def as_answer(self) -> ResponseCustomTool:
        """Return the tool as a response repeats it."""
        return ResponseCustomTool(
            name=self.name, description=self.description or None, format=self.format
        )

    def function(self) -> dict[str, Any]:
        """Return the function as chats declare it."""
        about = self.description
        if isinstance(definition := self.format.get("definition"), str):
            syntax = self.format.get("syntax", "")
            about = f"{about}\n\n{CUSTOM_INPUT} follows this {syntax} grammar:\n{definition}"
        return {
            "name": self.name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            },
        }


class HostedTool(WireModel):
    """A tool that this server cannot run."""

    type: Annotated[str, Field(pattern=_HOSTED)]


_DECLARED = ("function", "custom", "namespace", "mcp")


def _type_of(value: Any) -> str:
    kind = type_of(value) or "function"
    return UNION_TAG + (kind if kind in _DECLARED else "hosted")


def _known_type(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, *_DECLARED):
        return value
    if isinstance(kind, str) and re.match(_HOSTED, kind):
        return value
    raise PydanticCustomError(
        "unsupported_tool",
        "this server has no tools of this type; declare a function (type function) and run it in "
        "the client",
    )


def _client_runs(value: Any) -> Any:
    """Return a tool, or the choice of a tool, that a client can run."""
    if isinstance(value, dict) and value.get("type", "function") not in ("function", "custom"):
        raise PydanticCustomError(
            "unsupported_tool",
            "this server runs no tools of its own; declare a function (type function) and run it "
            "in the client",
        )
    return value


ClientTool = Annotated[
    Annotated[FunctionTool, Tag(UNION_TAG + "function")]
    | Annotated[CustomTool, Tag(UNION_TAG + "custom")],
    Discriminator(_type_of),
    BeforeValidator(_client_runs),
]


class NamespaceTool(WireModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
    description: str = ""
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def as_answer(self) -> ResponseNamespace:
        """Return the tools as a response repeats them."""
        return ResponseNamespace(
            name=self.name,
            description=self.description,
            tools=[tool.as_answer() for tool in self.tools],
        )


DeclaredTool = Annotated[
    Annotated[FunctionTool, Tag(UNION_TAG + "function")]
    | Annotated[CustomTool, Tag(UNION_TAG + "custom")]
    | Annotated[NamespaceTool, Tag(UNION_TAG + "namespace")]
    | Annotated[McpTool, Tag(UNION_TAG + "mcp")]
    | Annotated[HostedTool, Tag(UNION_TAG + "hosted")],
    Discriminator(_type_of),
    BeforeValidator(_known_type),
]


class PromptTool(NamedTuple):
    """A tool and the name of the function that the model calls."""

    function_name: str
    namespace: str | None
    tool: FunctionTool | CustomTool | McpFunction
    about: str = ""

    def function(self) -> dict[str, Any]:
        """Return the function as chats declare it."""
        function = self.tool.function()
        about = "\n\n".join(text for text in (self.about, function["description"]) if text)
        return {**function, "name": self.function_name, "description": about}

    def is_named(self, name: str, namespace: str | None) -> bool:
        """Return whether a client means this tool. Without a namespace, any namespace matches."""
        return self.tool.name == name and namespace in (None, self.namespace)

    def is_of_server(self, label: str | None, name: str | None) -> bool:
        """Return whether this is a tool of an MCP server, the one with `name` if that is given."""
        is_mcp = isinstance(self.tool, McpFunction) and self.namespace == label
        return is_mcp and name in (None, self.tool.name)


def prompt_tools_of(tools: Sequence[DeclaredTool]) -> list[PromptTool]:
    """Return the functions of the prompt. The first tool of a namespace gets its description,
    too.
    """
    plain = [tool for tool in tools if isinstance(tool, FunctionTool | CustomTool)]
    functions = [PromptTool(tool.name, None, tool) for tool in plain]
    taken = {tool.name for tool in plain}
    for space in tools:
        if not isinstance(space, NamespaceTool):
            continue
        for index, tool in enumerate(space.tools):
            name = next(
                candidate
                for candidate in function_names(space.name, tool.name)
                if candidate not in taken
            )
            taken.add(name)
            functions.append(PromptTool(name, space.name, tool, "" if index else space.description))
    return functions


def mcp_prompt_tools(
    functions: Sequence[McpFunction], known: Sequence[PromptTool], about: str
) -> list[PromptTool]:
    """Return the functions of an MCP server under names that `known` does not have.

    `about` describes the server and is added to its first function.
    """
    taken = {tool.function_name for tool in known}
    found: list[PromptTool] = []
    for function in functions:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", function.name)[:_LONGEST_NAME] or "tool"
        space = re.sub(r"[^A-Za-z0-9_-]", "_", function.server_label)
        name = next(each for each in function_names(space, plain) if each not in taken)
        taken.add(name)
        found.append(PromptTool(name, function.server_label, function, "" if found else about))
    return found


def function_names(namespace: str, name: str) -> Iterator[str]:
    """Yield valid names for a function of a namespace, the best first."""
    joined = f"{namespace.rstrip('_')}__{name}"
    if re.fullmatch(FUNCTION_NAME, joined):
        yield joined
    yield name
    number = 2
    while True:
        end = f"_{number}"
        yield name[: _LONGEST_NAME - len(end)] + end
        number += 1


def by_function_name(functions: Sequence[PromptTool]) -> Mapping[str, PromptTool]:
    """Return the tools by the names under which the model calls them."""
    return {tool.function_name: tool for tool in functions}


class ChosenTool(WireModel):
    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether the tool is run by a server, not by a client."""
        return self.type not in ("function", "custom")

    def is_among(self, functions: Sequence[PromptTool]) -> bool:
        """Return whether `functions` has the tool."""
        return any(map(self.means, functions))

    def means(self, function: PromptTool) -> bool:
        """Return whether the choice names a function, or the MCP server of a function."""
        if self.type == "mcp":
            return function.is_of_server(self.server_label, self.name)
        return function.is_named(self.name or "", self.namespace)

    def as_answer(self) -> dict[str, Any]:
        """Return the choice as a response repeats it."""
        return self.model_dump(exclude_none=True)


_WORDS = ("none", "auto", "required")


class ToolChoice(WireModel):
    """A choice of tools.

    It is a word, which becomes `type`; a tool by its `name`; an MCP server by its `server_label`,
    with or without the `name` of a tool; or a list of allowed tools. `mode` says whether one of the
    allowed tools must be called.
    """

    type: Literal["none", "auto", "required", "function", "custom", "mcp", "allowed_tools"] = "auto"
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type in ("function", "custom") and self.name is None:
            raise disagreement("tool_choice", "tool_choice of a tool needs its name")
        if self.type == "mcp" and self.server_label is None:
            raise disagreement("tool_choice", "tool_choice of the type mcp needs server_label")
        if self.type == "allowed_tools" and not self.tools:
            raise disagreement("tool_choice", "tool_choice of the type allowed_tools needs tools")
        return self

    def as_answer(self) -> str | dict[str, Any]:
        """Return the choice as a response repeats it."""
        if self.type in _WORDS:
            return self.type
        if self.type == "allowed_tools":
            tools = [tool.as_answer() for tool in self.tools]
            return {"type": self.type, "mode": self.mode, "tools": tools}
        named = {"type", "name", "namespace", "server_label"}
        return self.model_dump(include=named, exclude_none=True)

    @property
    def labels(self) -> set[str | None]:
        """The MCP servers that the choice names."""
        labels = {tool.server_label for tool in self.tools if tool.type == "mcp"}
        return labels | ({self.server_label} if self.type == "mcp" else set())

    def after_a_call(self) -> ToolChoice:
        """Return the choice for the turns after a call. Otherwise the model would have to call for
        ever.
        """
        if self.type == "allowed_tools":
            return self.model_copy(update={"mode": "auto"})
        return self if self.type == "none" else ToolChoice()


def word_as_choice(value: Any) -> Any:
    """Return a word as an object with this type. Raise for the choice of a tool that no client
    runs.
    """
    if isinstance(value, str):
        if value not in _WORDS:
            raise PydanticCustomError(
                "tool_choice",
                'Input should be "none", "auto", "required", {{"type": "function", "name": NAME}}, '
                '{{"type": "mcp", "server_label": LABEL}} or {{"type": "allowed_tools", "mode": '
                'MODE, "tools": [...]}}',
            )
        return {"type": value}
    is_some = isinstance(value, dict) and value.get("type") in ("allowed_tools", "mcp")
    return value if is_some else _client_runs(value)

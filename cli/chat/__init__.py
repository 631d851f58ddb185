"""`piecework chat`: chat in the terminal, with a running server or one started for the chat."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import ChatClient
    from .screen import Screen

DEFAULT_MODEL = "smollm2-135m"
EXIT_FAILED = 1


def add_parser(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="chat with a model in the terminal",
        usage="%(prog)s [MODEL] [flags]",
        description=f"Chat with a model. Starts a server for MODEL (default: {DEFAULT_MODEL}) on a "
        "free port and stops it at the end. With --base-url, uses a running server, and MODEL is "
        "the name of one of its models. /help in the chat lists commands. Input from a pipe is "
        "read line by line, and only answers go to standard output.",
        epilog="PIECEWORK_* variables set flags of the server that chat starts.",
    )
    chat.add_model_argument()
    chat.add_argument(
        "--base-url",
        default=None,
        metavar="URL",
        help="URL of a running server; default: start one",
    )
    chat.add_argument(
        "--api-key",
        default=None,
        metavar="KEY",
        help="key of the server at --base-url; prefer PIECEWORK_API_KEY; default: none",
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="system prompt; default: none")
    chat.add_argument("--plain", action="store_true", help="no Markdown and no line editing")
    chat.add_config_file_argument()
    chat.set_defaults(func=_chat, parser=chat)


def _chat(arguments: argparse.Namespace) -> int:
    """Run the chat. Returns 1 if a pipe's last question got no answer or its reader has closed."""
    from .client import ChatError
    from .conversation import Conversation
    from .screen import PlainScreen
    from .session import Session

    if sys.stdin is None or sys.stdout is None:
        raise ValueError("standard input or output is closed; chat needs both")
    # Print "?" for characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    plain = PlainScreen()
    asked = getattr(arguments, "model_path", "")
    try:
        with _server(asked, arguments, plain) as (client, model):
            session = Session(client, model, Conversation(arguments.system), plain)
            if not arguments.plain and sys.stdin.isatty() and sys.stdout.isatty():
                session.screen = _best_screen(session.commands, plain)
                session.screen.note(f"{model}; /help lists commands, Ctrl-D ends")
            session.run()
            return EXIT_FAILED if session.failed and not sys.stdin.isatty() else 0
    except ChatError as error:
        raise ValueError(str(error)) from None
    except BrokenPipeError:
        # Python flushes standard output at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


@contextlib.contextmanager
def _server(
    asked: str, arguments: argparse.Namespace, screen: Screen
) -> Iterator[tuple[ChatClient, str]]:
    """Yield a client of the requested server, and the name of the model."""
    from .client import ChatClient

    with contextlib.ExitStack() as stack:
        if (url := arguments.base_url) is None:
            from .server import started

            url, key = stack.enter_context(started(asked or DEFAULT_MODEL, screen.status))
            client = ChatClient(url, key)
            yield client, client.models()[0]
            return
        client = ChatClient(url, arguments.api_key)
        names = client.models()
        if not names:
            raise ValueError(f"the server at {url} serves no model")
        if asked and asked not in names:
            raise ValueError(f"{url} does not serve {asked}; choose one of {', '.join(names)}")
        yield client, asked or names[0]


def _best_screen(commands: list[str], plain: Screen) -> Screen:
    """Return a screen with Markdown and editing if the extra `chat` is installed, else `plain`."""
    if not all(
        importlib.util.find_spec(name) for name in ("prompt_toolkit", "rich", "markdown_it")
    ):
        plain.note("for Markdown and editing: pip install 'piecework[chat]'")
        return plain
    from ...kernels.cache_folder import cache_folder
    from .rich_screen import RichScreen

    return RichScreen(cache_folder() / "chat_history", commands)

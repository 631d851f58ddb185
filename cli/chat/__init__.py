"""`piecework chat`: a chat in a terminal, with a server of its own or one that runs."""

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
        description=f"Chat with a model. Starts a server of MODEL ({DEFAULT_MODEL}) on a free "
        "port, and ends it afterwards; with --base-url it asks one that runs, and MODEL is the "
        "name of one of its models. /help in the chat lists its commands. A pipe is read line "
        "by line, and gets nothing but the answers.",
        epilog="PIECEWORK_* variables are settings of the server that it starts.",
    )
    chat.add_model_argument()
    chat.add_argument(
        "--base-url", default=None, metavar="URL", help="default: a server of its own"
    )
    chat.add_argument(
        "--api-key",
        default=None,
        metavar="KEY",
        help="of the server at --base-url; better by PIECEWORK_API_KEY; default: none",
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="system prompt; default: none")
    chat.add_argument(
        "--plain", action="store_true", help="without Markdown and editing, as without a terminal"
    )
    chat.add_config_file_argument()
    chat.set_defaults(func=_chat, parser=chat)


def _chat(arguments: argparse.Namespace) -> int:
    """Exit code 1 where the last question of a pipe got no answer, or nobody reads the answers."""
    from .client import ChatError
    from .conversation import Conversation
    from .screen import PlainScreen
    from .session import Session

    if sys.stdin is None or sys.stdout is None:
        raise ValueError("standard input and output are needed, and one of them is closed")
    # A terminal that cannot show a character is no reason to end.
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
        # Nor can Python write what it still holds when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


@contextlib.contextmanager
def _server(
    asked: str, arguments: argparse.Namespace, screen: Screen
) -> Iterator[tuple[ChatClient, str]]:
    """A client of the server that was asked for, and the name of the model."""
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
            raise ValueError(f"{url} does not serve {asked}; it has {', '.join(names)}")
        yield client, asked or names[0]


def _best_screen(commands: list[str], plain: Screen) -> Screen:
    """With Markdown and editing where the extra `chat` is installed."""
    if not all(
        importlib.util.find_spec(name) for name in ("prompt_toolkit", "rich", "markdown_it")
    ):
        plain.note("for Markdown and editing: pip install 'piecework[chat]'")
        return plain
    from ...kernels.cache_folder import cache_folder
    from .rich_screen import RichScreen

    return RichScreen(cache_folder() / "chat_history", commands)

"""Where images come from: base64, allowed servers by one checked address, files of a folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from image_stand_in import base64_of, data_url, image_file

from piecework.server.config.media import MediaConfig, parse_limit
from piecework.server.core.errors import InvalidRequest
from piecework.server.media import remote
from piecework.server.media.parts import ImagePart
from piecework.server.media.sources import Sources

PNG = image_file()
Answers = dict[str, bytes]


def answer(content: bytes, head: str = "200 OK", *, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return f"HTTP/1.1 {head}\r\nContent-Length: {size}\r\n\r\n".encode() + content


def redirect(url: str) -> bytes:
    return answer(b"", f"302 Found\r\nLocation: {url}")


@contextlib.asynccontextmanager
async def served(answers: Answers) -> AsyncIterator[tuple[int, list[str]]]:
    """A server on 127.0.0.1: its port, and the lines `GET /path Host` that came."""
    came: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        host = next(line[6:] for line in head.split("\r\n") if line.lower().startswith("host: "))
        came.append(f"{path} {host}")
        writer.write(answers.get(path, answer(b"", "404 Not Found")))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], came


def sources(**settings: Any) -> Sources:
    return Sources(MediaConfig(**settings))


async def refusal(found: Sources, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await found.read(ImagePart(url, param="p"))
    assert caught.value.param == "p"
    return caught.value.message


async def test_base64_is_read_with_line_ends_and_without_padding() -> None:
    found, text = sources(), base64_of(PNG)
    lines = "\n".join(text[begin : begin + 20] for begin in range(0, len(text), 20))
    for part in (
        ImagePart(data_url(PNG)),
        ImagePart(f"data:image/png;base64,{lines}"),
        ImagePart(data=text.rstrip("=")),
        ImagePart(f"DATA:;base64,{text}"),
    ):
        assert await found.read(part) == PNG
        assert part == ImagePart()


async def test_an_allowed_server_is_asked_and_others_are_not() -> None:
    async with served({"/a.png": answer(PNG), "/t.txt": answer(b"text")}) as (port, came):
        found = sources(allow_remote_media=f"127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}"
        assert await found.read(ImagePart(f"{url}/a.png")) == PNG
        assert "no image" in await refusal(found, f"{url}/t.txt")
        assert "status 404" in await refusal(found, f"{url}/other")
        assert "not named by --allow-remote-media" in await refusal(found, "http://b.example/a.png")
        assert "not named" in await refusal(found, f"http://localhost:{port}/a.png")
        assert "password" in await refusal(found, f"http://a:b@127.0.0.1:{port}/a.png")
        assert len(came) == 3


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:PORT/a.png",
        "http://[::1]:PORT/a.png",
        "http://localhost:PORT/a.png",
        "http://[::ffff:127.0.0.1]:PORT/a.png",
        "http://2130706433:PORT/a.png",
        "http://10.0.0.7/a.png",
    ],
)
async def test_private_addresses_are_not_reached_by_name_or_redirect(
    target: str, resolve: Callable[..., None]
) -> None:
    async with served({"/a.png": answer(PNG)}) as (port, came):
        target = target.replace("PORT", str(port))
        assert "not public" in await refusal(sources(allow_remote_media="*"), target)
        async with served({"/go": redirect(target)}) as (other, _):
            resolve("files.example", "127.0.0.1")
            found = sources(allow_remote_media=f"files.example:{other},127.0.0.0/8")
            assert "not named" in await refusal(found, f"http://files.example:{other}/go")
        assert came == []


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let a name have an address; other names resolve as always."""
    names: dict[str, list[str]] = {}

    def add(name: str, *addresses: str) -> None:
        names[name] = [*addresses]
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def resolved(host: Any, port: Any, **settings: Any) -> Any:
            if host not in names:
                return await real(host, port, **settings)
            found = names[host]
            address = found.pop(0) if len(found) > 1 else found[0]
            return [(None, None, None, "", (address, port))]

        monkeypatch.setattr(loop, "getaddrinfo", resolved)

    return add


async def test_a_name_is_resolved_once(resolve: Callable[..., None]) -> None:
    """DNS rebinding: the second answer of the name server would be another machine."""
    async with served({"/a.png": answer(PNG)}) as (port, came):
        resolve("rebind.example", "127.0.0.1", "192.0.2.1")
        found = sources(allow_remote_media=f"rebind.example:{port},127.0.0.0/8")
        assert await found.read(ImagePart(f"http://rebind.example:{port}/a.png")) == PNG
        assert came == [f"/a.png rebind.example:{port}"]


async def test_redirects_are_followed_a_few_times_to_allowed_servers() -> None:
    own = {"/a": redirect("/b"), "/b": answer(PNG), "/loop": redirect("/loop")}
    async with served(own) as (port, came):
        found = sources(allow_remote_media=f"127.0.0.1:{port}")
        assert await found.read(ImagePart(f"http://127.0.0.1:{port}/a")) == PNG
        came.clear()
        assert "redirects" in await refusal(found, f"http://127.0.0.1:{port}/loop")
        assert len(came) == remote.MOST_REDIRECTS + 1


async def test_size_and_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    large = PNG + bytes(200_000)
    own = {
        "/large": answer(large),
        "/lies": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + large,
        "/cut": answer(b"", length=10),
        "/packed": answer(PNG, "200 OK\r\nContent-Encoding: gzip"),
    }
    async with served(own) as (port, _):
        found = sources(allow_remote_media=f"127.0.0.1:{port}", max_image_bytes=100_000)
        url = f"http://127.0.0.1:{port}"
        assert "--max-image-bytes" in await refusal(found, f"{url}/large")
        assert "--max-image-bytes" in await refusal(found, f"{url}/lies")
        assert "cannot be fetched" in await refusal(found, f"{url}/packed")
        assert "cannot be fetched" in await refusal(found, f"{url}/cut")
        monkeypatch.setattr(remote, "SECONDS", 0.0)
        assert "not there after" in await refusal(found, f"{url}/large")
    assert "--max-image-bytes" in await refusal(found, data_url(large))


async def test_files_are_read_below_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe.png")
    found = sources(allowed_local_media_path=str(folder))
    assert await found.read(ImagePart(f"file://{folder}/a%20b.png")) == PNG
    for name in ("link.png", "../secret.png", "%2e%2e/secret.png", "pipe.png", "", "none", "%00"):
        assert "below --allowed-local-media-path" in await refusal(found, f"file://{folder}/{name}")


def test_limits_of_images_have_the_forms_of_vllm() -> None:
    for text, most in (
        ("image=4", 4),
        ("image=2,video=0", 2),
        ('{"image": 0}', 0),
        ('{"image": {"count": 5, "width": 512}}', 5),
        ("video=1", 1024),
    ):
        assert parse_limit(text) == most
    for text in ("", "4", "image", "image=-1", "image=x", "cat=1", "[1]", '{"image": null}'):
        with pytest.raises(ValueError, match="--limit-mm-per-prompt"):
            parse_limit(text)

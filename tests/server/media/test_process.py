"""The client of the processes that read images: hangs, crashes, bad starts, callers that leave."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from piecework.runtime.core.images import Preprocess
from piecework.server.config.media import MediaConfig
from piecework.server.core.errors import Unavailable
from piecework.server.media import process
from piecework.server.media.media import Media
from piecework.server.media.process import PreprocessProcesses, ProcessEnded
from piecework.server.serving.service import Service

# Answers with its own id, unless the text says otherwise.
SCRIPT = """
import os, sys, time
from piecework.runtime.core.images import Preprocessed, PreprocessReady
from piecework.runtime.process.message_pipe import pack, read

def write(message):
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()

if sys.argv[1] == "broken":
    write(PreprocessReady(error="there is no Pillow"))
    sys.exit(2)
if sys.argv[1] == "silent":
    sys.exit(3)
write(PreprocessReady(placeholder="<image>", tokens_of_1024=4))
while (request := read(sys.stdin.buffer)) is not None:
    if request.text == "hang":
        time.sleep(600)
    if request.text == "die":
        os._exit(7)
    if request.text == "garbage":
        sys.stdout.buffer.write(b"x" * 100)
        sys.stdout.buffer.flush()
    if request.text.startswith("slow"):
        time.sleep(0.5)
    if request.text == "slow death":
        os._exit(7)
    write(Preprocessed(input_ids=[os.getpid()]))
"""


@pytest.fixture(autouse=True)
def scripted_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(process, "COMMAND", (sys.executable, str(path)))


@pytest.fixture
async def processes() -> AsyncIterator[PreprocessProcesses]:
    found = PreprocessProcesses(["ok"], count=2)
    yield found
    await found.close()
    left = [one.cmdline() for one in psutil.Process().children()]
    assert not [command for command in left if any("script.py" in part for part in command)]


def asked(text: str = "ok") -> Preprocess:
    return Preprocess(text=text, images=[], most_pixels=1)


async def pid(processes: PreprocessProcesses) -> int:
    return (await processes.run(asked())).input_ids[0]


async def test_one_process_is_kept_and_others_start_when_they_are_needed(
    processes: PreprocessProcesses,
) -> None:
    assert (await processes.ready()).placeholder == "<image>"
    first = await pid(processes)
    assert await pid(processes) == first
    several = await asyncio.gather(*[processes.run(asked("slow")) for _ in range(4)])
    used = {answer.input_ids[0] for answer in several}
    assert first in used and len(used) == 2


@pytest.mark.parametrize("text", ["die", "garbage"])
async def test_a_crash_costs_one_request(processes: PreprocessProcesses, text: str) -> None:
    first = await pid(processes)
    with pytest.raises(ProcessEnded, match="has ended"):
        await processes.run(asked(text))
    assert await pid(processes) != first


async def test_a_hang_is_ended_and_blocks_nobody(
    processes: PreprocessProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await pid(processes)
    second = await asyncio.gather(processes.run(asked("slow")), processes.run(asked("slow")))
    monkeypatch.setattr(process, "SECONDS", 0.3)
    hanging = asyncio.create_task(processes.run(asked("hang")))
    await asyncio.sleep(0)
    other = await pid(processes)
    assert not hanging.done() and other in {answer.input_ids[0] for answer in second}
    with pytest.raises(ProcessEnded, match=r"more than 0\.3 s"):
        await hanging
    monkeypatch.setattr(process, "SECONDS", 30.0)
    assert {first, other} & {await pid(processes)}


async def test_callers_that_leave_end_no_process_and_take_no_room(
    processes: PreprocessProcesses,
) -> None:
    first = await pid(processes)
    for text in ("slow", "slow death"):
        leaving = asyncio.create_task(processes.run(asked(text)))
        await asyncio.sleep(0.1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await asyncio.gather(*processes._working, return_exceptions=True)
        assert (await pid(processes) == first) is (text == "slow")
    assert len(await asyncio.gather(*[pid(processes) for _ in range(4)])) == 4


@pytest.mark.parametrize(("kind", "told"), [("broken", "no Pillow"), ("silent", "does not start")])
async def test_a_process_that_cannot_work_is_a_503_with_the_reason(kind: str, told: str) -> None:
    processes = PreprocessProcesses([kind])
    for _ in range(2):
        with pytest.raises(Unavailable, match=told):
            await processes.run(asked())
    await processes.close()


@pytest.mark.parametrize(("kind", "reason"), [("broken", "there is no Pillow"), ("silent", None)])
async def test_only_files_that_make_no_image_fail_the_service(
    kind: str, reason: str | None
) -> None:
    """A process that does not start for another reason is started again later."""
    processes = PreprocessProcesses([kind])
    media = Media(MediaConfig(), processes)
    engine: Any = SimpleNamespace(failed=asyncio.Event(), failure=None, user_error=False)
    app: Any = SimpleNamespace(state=SimpleNamespace(serving=SimpleNamespace(media=media)))
    service = Service(engine, app, lambda *_: "")
    media.start()
    await service.settle()
    assert service.failure == reason and media.failed.is_set() == (reason is not None)
    if reason is not None:
        await asyncio.wait_for(service.until_failed(), 10)
        assert service.is_user_error
    # As if the files were repaired: the model of a fleet is loaded again.
    processes._command, processes._failed = (*process.COMMAND, "ok"), None
    media.start()
    await service.settle()
    assert service.failure is None and media.info is not None
    await service.close()

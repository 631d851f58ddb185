"""Files of every format become pieces, and broken or hostile ones an error."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from typing import Any

import numpy as np
import pytest
from speech_here import encoded, wav
from starlette.datastructures import UploadFile
from tiny_whisper import noise

from piecework.server.audio import decode_process, decoding
from piecework.server.audio.decode_process import BrokenAudio
from piecework.server.audio.decoding import Decoders, Piece, pause
from piecework.server.core.errors import InvalidRequest

SAMPLES = noise(3.0)
FORMATS = {
    "wav": ("wav", "pcm_s16le", 16_000),
    "wav of another rate": ("wav", "pcm_s16le", 22_050),
    "flac": ("flac", "flac", 16_000),
    "mp3": ("mp3", "mp3", 16_000),
    "ogg": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "mp4": ("mp4", "aac", 16_000),
}


def decoded(content: bytes, most_seconds: float = 60) -> bytes:
    output = io.BytesIO()
    decode_process.decode(content, most_seconds, output)
    return output.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_samples(name: str) -> None:
    found = np.frombuffer(decoded(encoded(SAMPLES, *FORMATS[name])), "<i2").astype(float)
    wanted = np.frombuffer(SAMPLES, "<i2").astype(float)
    assert abs(len(found) - len(wanted)) < 4000
    # Encoders delay what they get.
    best = (
        max(
            float(np.corrcoef(found[shift : shift + 10_000], wanted[:10_000])[0, 1])
            for shift in range(0, 3000)
            if shift + 10_000 <= len(found)
        )
        if name not in ("wav", "flac")
        else float(np.array_equal(found, wanted))
    )
    assert best > 0.85


def test_two_channels_become_their_mean() -> None:
    left = np.frombuffer(SAMPLES, "<i2")
    both = np.stack([left, np.zeros_like(left)], axis=1).tobytes()
    found = np.frombuffer(decoded(wav(both, channels=2)), "<i2")
    assert np.corrcoef(found, left)[0, 1] > 0.99 and len(found) == len(left)


BROKEN = {
    "nothing": b"",
    "text": b"Once upon a time. " * 40,
    "a header alone": wav(b""),
    "a cut header": wav(SAMPLES)[:30],
    "a cut compressed header": encoded(SAMPLES, *FORMATS["flac"])[:60],
    "zeros": bytes(5000),
    "a playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10.0,\nfile:///etc/passwd\n"
    b"#EXT-X-ENDLIST\n",
    "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a description of a session": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 9 RTP/AVP 0\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_audio_is_refused(name: str) -> None:
    with pytest.raises(BrokenAudio):
        decoded(BROKEN[name])


def test_a_playlist_reaches_no_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        reached: list[Any] = []

        def accept() -> None:
            with contextlib.suppress(TimeoutError):
                reached.append(listener.accept())

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.ts"
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n"
        with pytest.raises(BrokenAudio):
            decoded(playlist.encode())
        thread.join()
    assert not reached


def test_a_cut_file_has_the_samples_before_the_cut() -> None:
    whole = encoded(SAMPLES, *FORMATS["mp3"])
    assert 20_000 < len(decoded(whole[: len(whole) // 2])) < len(SAMPLES)


def test_a_file_that_is_too_long_is_refused_whether_its_header_says_so_or_not() -> None:
    silent = bytearray(encoded(SAMPLES, *FORMATS["flac"]))
    # FLAC: 0 samples are an unknown number.
    silent[21:26] = bytes([silent[21] & 0xF0, 0, 0, 0, 0])
    for content in (wav(SAMPLES), bytes(silent)):
        with pytest.raises(BrokenAudio, match="more than 1 s"):
            decoded(content, 1)


async def pieces_of(content: bytes, window: float = 1.0, most: float = 60) -> list[Piece]:
    file = UploadFile(io.BytesIO(content))
    async with Decoders(most).open(file, window) as pieces:
        return [piece async for piece in pieces]


async def test_pieces_are_the_samples_cut_where_they_are_quiet() -> None:
    samples = np.frombuffer(SAMPLES, "<i2").copy()
    samples[14_800:16_000] = 0
    pieces = await pieces_of(wav(samples.tobytes()))
    assert b"".join(piece.samples for piece in pieces) == samples.tobytes()
    assert all(0 < piece.seconds <= 1 for piece in pieces)
    starts = [piece.start for piece in pieces]
    assert starts == [sum(each.seconds for each in pieces[:n]) for n in range(len(pieces))]
    assert 14_800 <= round(16_000 * pieces[0].seconds) <= 16_000


async def test_errors_of_the_process_are_those_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest, match="no audio that this server can read"):
        await pieces_of(b"abc")
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await pieces_of(wav(SAMPLES), most=1)
    killed = ("/bin/sh", "-c", "cat > /dev/null; kill -SEGV $$")
    monkeypatch.setattr(decoding, "_COMMAND", killed)
    with pytest.raises(InvalidRequest, match="too much memory or time"):
        await pieces_of(wav(SAMPLES))


def test_a_piece_ends_in_the_last_silence() -> None:
    loud = np.full(96_000, 9000, np.int16)
    assert pause(loud) > 90_000  # All is as loud: the piece is as long as it can be.
    loud[84_000:86_000] = 0
    assert 84_000 <= pause(loud) <= 86_000

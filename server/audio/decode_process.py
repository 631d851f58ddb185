"""Decodes one file of audio: `python -m piecework.server.audio.decode_process`.

FFmpeg reads files of strangers, so it runs in a process of its own with limits on memory and time.
The process reads the number of seconds that the audio may have as a line, and then the file, from
standard input. It writes samples to standard output: one channel of little-endian int16. If it
fails, it writes a reason to standard error.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import av

SAMPLE_RATE = 16_000
EXIT_BROKEN = 3  # The exit code for a file that cannot be decoded, and for one that is too long.
_MEGABYTES = 1024
_CPU_SECONDS = 600
# Formats that hold their own audio. Others, such as playlists, name files or addresses.
FORMATS = "wav,w64,aiff,flac,mp3,ogg,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,aac,caf"
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": ""}


class BrokenAudio(Exception):
    """The file cannot be decoded. The message says why, for the client."""


def decode(content: bytes, most_seconds: float, output: Any) -> None:
    """Write the samples of a file. Raises `BrokenAudio`."""
    most = int(most_seconds * SAMPLE_RATE)
    written = 0
    try:
        container = av.open(io.BytesIO(content), options=_OPTIONS)
    except av.FFmpegError:
        raise BrokenAudio(
            "the file is no audio that this server can read; send WAV, FLAC, MP3, OGG, WebM or MP4"
        ) from None
    with container:
        if not container.streams.audio:
            raise BrokenAudio("the file has no audio")
        if container.duration is not None and container.duration / av.time_base > most_seconds + 1:
            raise _too_long(most_seconds)
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        for frame in _frames(container, stream):
            for part in resampler.resample(frame):
                samples = part.to_ndarray().astype("<i2").tobytes()
                written += len(samples) // 2
                if written > most:
                    raise _too_long(most_seconds)
                output.write(samples)
    if not written:
        raise BrokenAudio("the file has no audio, or all of it is damaged")


def _frames(container: Any, stream: Any) -> Any:
    """Yield the frames of a stream, then None, which flushes a resampler. Skip damaged packets."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            break
        except av.FFmpegError:
            break  # The rest of the file is cut off.
        try:
            yield from packet.decode()
        except av.FFmpegError:
            continue
    yield None


def _too_long(most_seconds: float) -> BrokenAudio:
    return BrokenAudio(
        f"the audio has more than {most_seconds:g} s (--max-audio-seconds); send it in parts"
    )


def main() -> int:
    try:
        import resource
    except ImportError:  # Windows has no resource module.
        pass
    else:
        size = _MEGABYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    av.logging.set_level(None)
    most_seconds = float(sys.stdin.buffer.readline())
    try:
        decode(sys.stdin.buffer.read(), most_seconds, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return 0  # No caller reads any more.
    except BrokenAudio as error:
        sys.stdout.buffer.flush()
        sys.stderr.write(f"{error}\n")
        return EXIT_BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main())

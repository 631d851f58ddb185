"""Servers of one model beside each other, which take turns with each load:

    python -m piecework.lab.peers_in_turn --server 'piecework=piecework serve FILE --port {port}' \\
        --server 'llama=llama-server -m FILE --port {port}' --loads prompt512,one,eight

All servers run all the time, and an idle one takes no processor, so that a slow minute of the
machine meets each of them. The first server is compared with every other one, by the clock and by
the processor time of all processes of a server, which says more on a busy machine if each server
has one thread: the median of each, and of the ratios of each round, with the least and the highest
ratio. Prompts are random token ids, other ones in each round. Loads that may have images are
streamed chats of random words. A load that a server fails is left out for it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import psutil
import uvloop

from ..bench.client import RequestFailed, ServerUnusable
from ..bench.server_process import first_token, running_server
from ..bench.serving import ServingSettings, measure
from ..bench.target import Api, Target
from ..bench.workloads import Workload


class Times(NamedTuple):
    """Seconds that a load took."""

    clock: float
    processor: float


class Load(NamedTuple):
    """Tokens of each prompt and each answer, and requests, which are sent at once.

    Attributes:
        image_share: Share of the requests that have an image of 512 x 512 pixels. None: requests
            are completions, and not chats.
        again: The same requests were sent just before.
    """

    prompt: int
    answer: int
    requests: int
    image_share: float | None = None
    again: bool = False


LOADS = {
    "prompt512": Load(512, 1, 1),
    "prompt8k": Load(8000, 1, 1),
    "prompt32k": Load(32000, 1, 1),
    "one": Load(32, 64, 1),
    "eight": Load(32, 64, 8),
    "thirty-two": Load(32, 64, 32),
    "image": Load(64, 1, 1, 1.0),
    "image-again": Load(64, 1, 1, 1.0, again=True),
    "chats8": Load(64, 64, 8, 0.0),
    "images8": Load(64, 64, 8, 0.5),
}


async def _times(
    target: Target, process: psutil.Process, load: Load, seed: int, vocab_size: int
) -> Times | None:
    settings = ServingSettings(
        num_prompts=load.requests,
        max_concurrency=load.requests,
        num_warmups=0,
        ignore_eos=True,
        stream=load.image_share is not None,
        seed=seed,
        images_alone=0,
    )
    workload = Workload(
        random_input_len=load.prompt, random_output_len=load.answer, vocab_size=vocab_size
    )
    if load.image_share is not None:
        target = replace(target, api=Api.CHAT)
        workload = replace(workload, kind="words", images=1, image_share=load.image_share)
    if load.again:
        await measure(target, settings, workload)
    before = processor_time(process)
    result = await measure(target, settings, workload)
    if result.completed < load.requests or result.output_tokens != load.requests * load.answer:
        return None
    return Times(result.duration, processor_time(process) - before)


def processor_time(process: psutil.Process) -> float:
    """Return the processor time of a process and its descendants."""
    spent = (each.cpu_times() for each in (process, *process.children(recursive=True)))
    return float(sum(each.user + each.system for each in spent))


async def _run(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        servers: dict[str, tuple[Target, psutil.Process]] = {}
        for label, command in arguments.server:
            process, port = stack.enter_context(running_server(label, command))
            target = Target(base_url=f"http://127.0.0.1:{port}", keep_alive=False)
            try:
                named = await first_token(label, target, process)
                servers[label] = named, psutil.Process(process.pid)
            except ServerUnusable as error:
                print(error, file=sys.stderr)
        for name in arguments.loads.split(","):
            found: dict[str, list[Times]] = {label: [] for label in servers}
            for turn in range(arguments.rounds + 1):
                # No load has the prompts of another one, which a server may have kept.
                seed = turn * len(LOADS) + list(LOADS).index(name)
                for label, server in servers.items():
                    try:
                        times = await _times(*server, LOADS[name], seed, arguments.vocab_size)
                    except (RequestFailed, ServerUnusable) as error:
                        print(f"{label}, {name}: {error}", file=sys.stderr)
                        continue
                    if times is not None and (turn > 0 or arguments.rounds == 0):
                        found[label].append(times)
            _tell(name, found)


def _tell(name: str, found: dict[str, list[Times]]) -> None:
    own, *_ = found.values()
    for label, its in found.items():
        cells = [
            _cell([times[kind] for times in own], [times[kind] for times in its])
            for kind in range(len(Times._fields))
        ]
        print(f"| {name} | {label} | {' | '.join(cells)} |", flush=True)


def _cell(own: list[float], its: list[float]) -> str:
    ratios = sorted(seconds / mine for mine, seconds in zip(own, its, strict=False))
    if not ratios:
        return "-"
    told = f"{median(ratios):.2f}x, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return f"{1000 * median(its):,.0f} ms ({told})"


def _server(text: str) -> tuple[str, str]:
    label, separator, command = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return label, command


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.peers_in_turn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", action="append", type=_server, required=True)
    parser.add_argument("--loads", default="prompt512,one,eight,thirty-two")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up; 0: only it")
    parser.add_argument("--vocab-size", type=int, default=49152)
    arguments = parser.parse_args()
    if unknown := set(arguments.loads.split(",")) - set(LOADS):
        parser.error(f"--loads: {unknown.pop()!r} is not one of {','.join(LOADS)}")
    print("| load | server | by the clock | of the processor |\n|---|---|---|---|")
    uvloop.run(_run(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

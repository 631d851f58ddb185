"""Servers of one model beside each other, which take turns with each load:

    python -m piecework.lab.peers_in_turn --server 'piecework=piecework serve FILE --port {port}' \\
        --server 'llama=llama-server -m FILE --port {port}' --loads prompt512,one,eight

All servers run all the time, and an idle one takes no processor, so that a slow minute of the
machine meets each of them. The first server is compared with every other one: the median of its
rates, and of the ratios of each round, with the least and the highest ratio. Prompts are random
token ids, other ones in each round. A load that a server fails is left out for it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import uvloop

from ..bench.client import RequestFailed, ServerUnusable
from ..bench.server_process import first_token, running_server
from ..bench.serving import ServingSettings, measure
from ..bench.target import Target
from ..bench.workloads import Workload


class Load(NamedTuple):
    """Tokens of each prompt and each answer, and requests, which are sent at once."""

    prompt: int
    answer: int
    requests: int

    @property
    def tokens(self) -> int:
        """The tokens whose rate is told."""
        return self.requests * (self.answer if self.answer > 1 else self.prompt)


LOADS = {
    "prompt512": Load(512, 1, 1),
    "prompt8k": Load(8000, 1, 1),
    "prompt32k": Load(32000, 1, 1),
    "one": Load(32, 64, 1),
    "eight": Load(32, 64, 8),
    "thirty-two": Load(32, 64, 32),
}


async def _rate(target: Target, load: Load, seed: int, vocab_size: int) -> float | None:
    settings = ServingSettings(
        num_prompts=load.requests,
        max_concurrency=load.requests,
        num_warmups=0,
        ignore_eos=True,
        stream=False,
        seed=seed,
    )
    workload = Workload(
        random_input_len=load.prompt, random_output_len=load.answer, vocab_size=vocab_size
    )
    result = await measure(target, settings, workload)
    if result.completed < load.requests or result.output_tokens != load.requests * load.answer:
        return None
    return load.tokens / result.duration


async def _run(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        for label, command in arguments.server:
            process, port = stack.enter_context(running_server(label, command))
            target = Target(base_url=f"http://127.0.0.1:{port}", keep_alive=False)
            try:
                targets[label] = await first_token(label, target, process)
            except ServerUnusable as error:
                print(error, file=sys.stderr)
        for name in arguments.loads.split(","):
            rates: dict[str, list[float]] = {label: [] for label in targets}
            for turn in range(arguments.rounds + 1):
                for label, target in targets.items():
                    try:
                        rate = await _rate(target, LOADS[name], turn, arguments.vocab_size)
                    except (RequestFailed, ServerUnusable) as error:
                        print(f"{label}, {name}: {error}", file=sys.stderr)
                        continue
                    if rate is not None and (turn > 0 or arguments.rounds == 0):
                        rates[label].append(rate)
            _tell(name, rates)


def _tell(name: str, rates: dict[str, list[float]]) -> None:
    own, *_ = rates.values()
    for label, found in rates.items():
        if not found:
            print(f"| {name} | {label} | - | - |", flush=True)
            continue
        ratios = sorted(mine / its for mine, its in zip(own, found, strict=False))
        told = f"{median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"
        print(f"| {name} | {label} | {median(found):,.1f} | {told} |", flush=True)


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
    print("| load | server | tokens a second | ratio |\n|---|---|---|---|")
    uvloop.run(_run(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

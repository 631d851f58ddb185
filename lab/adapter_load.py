"""What adapters (LoRA) cost under load: servers with and without them, which take turns.

    python -m piecework.lab.adapter_load --rounds 5

It writes random adapters of a GGUF model as GGUF files, and starts two servers of the model: one
without adapters, and one with all of them in `--slots` slots. In each round, the first server gets
a load of the base model, and the second server the same load of the base model, of one adapter, of
as many as there are slots, and of all by Zipf's law. Each line of the table, which is printed after
each round, has the median rate of output tokens, the median of the ratios to the server without
adapters in the same round, with the least and the highest one, the longest gap between two events
of a stream, and how often that is the median gap.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import gguf
import numpy as np
import uvloop

from ..bench.server_process import first_token, running_server
from ..bench.serving import ServingResult, ServingSettings, measure
from ..bench.target import Target
from ..bench.workloads import Workload
from ..runtime.files.gguf_reader import FastGGUFReader
from ..runtime.files.resolve import resolve_model_path

_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Case(NamedTuple):
    """A row of the table: the server that gets the load, and the adapters that requests name."""

    name: str
    has_adapters: bool
    adapters: tuple[str, ...] = ()
    zipf: float | None = None


def write_adapter(reader: FastGGUFReader, path: Path, rank: int, seed: int) -> None:
    """Write an adapter of all projections of a GGUF model that hardly changes what it says."""
    rng = np.random.default_rng(seed)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if stem in _PROJECTIONS:
            columns, rows = map(int, tensor.shape)
            for half, shape in (("lora_a", (rank, columns)), ("lora_b", (rows, rank))):
                numbers = rng.standard_normal(shape, np.float32) * 0.01
                writer.add_tensor(f"{tensor.name}.{half}", numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _cases(names: list[str], slots: int, zipf: float) -> list[Case]:
    return [
        Case("without adapters", has_adapters=False),
        Case("enabled, not used", has_adapters=True),
        Case("one adapter", True, tuple(names[:1])),
        Case(f"{slots} adapters, mixed", True, tuple(names[:slots])),
        Case(f"{len(names)} adapters in {slots} slots, Zipf", True, tuple(names), zipf),
    ]


async def _run(given: argparse.Namespace) -> None:
    model = Path(resolve_model_path(given.model))
    reader = FastGGUFReader(model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = {f"a{number}": folder / f"a{number}.gguf" for number in range(given.adapters)}
        for seed, path in enumerate(files.values()):
            write_adapter(reader, path, given.rank, seed)
        serve = (
            f"{shlex.quote(sys.executable)} -m piecework serve {shlex.quote(str(model))} "
            f"--log-level warning {given.flags} --port {{port}}"
        )
        modules = " ".join(f"{name}={path}" for name, path in files.items())
        commands = {
            False: serve,
            True: f"{serve} --max-loras {given.slots} --lora-modules {modules}",
        }
        targets = {}
        for has_adapters, command in commands.items():
            process, port = stack.enter_context(running_server(str(has_adapters), command))
            target = Target(base_url=f"http://127.0.0.1:{port}")
            targets[has_adapters] = await first_token("piecework", target, process)
        cases = _cases(list(files), given.slots, given.zipf)
        if given.only:
            cases = [case for case in cases if case.name.startswith(("without", *given.only))]
        rounds: list[list[ServingResult]] = []
        for turn in range(given.rounds + 1):
            results = [
                await _measure(targets[case.has_adapters], case, turn, given) for case in cases
            ]
            if turn:  # The first round warms up.
                rounds.append(results)
                _tell(cases, rounds)


async def _measure(
    target: Target, case: Case, turn: int, given: argparse.Namespace
) -> ServingResult:
    settings = ServingSettings(
        num_prompts=given.requests,
        max_concurrency=given.concurrency,
        num_warmups=0,
        ignore_eos=True,
        seed=turn,
        lora=case.adapters,
        lora_zipf=case.zipf,
    )
    result = await measure(target, settings, given.workload)
    if result.failures.total:
        raise SystemExit(f"{case.name}: {result.failures.lines()}")
    return result


def _tell(cases: list[Case], rounds: list[list[ServingResult]]) -> None:
    print(f"\nafter {len(rounds)} rounds\n")
    print("| load | tokens/s | of that without adapters | longest gap | median gaps |")
    print("|---|---|---|---|---|")
    for place, case in enumerate(cases):
        rates = [each[place].output_tokens / each[place].duration for each in rounds]
        ratios = sorted(each[0].duration / each[place].duration for each in rounds)
        longest = median(max(each[place].itl) for each in rounds)
        gap = median(median(each[place].itl) for each in rounds)
        print(
            f"| {case.name} | {median(rates):,.0f} | {median(ratios):.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f}) | {1000 * longest:.0f} ms | {longest / gap:.1f} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.adapter_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a built-in alias")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--flags", default="", help="more flags of both servers")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of loads")
    given = parser.parse_args()
    workload = Workload(random_input_len=given.input_len, random_output_len=given.output_len)
    given.workload = replace(workload, kind="token-ids")
    uvloop.run(_run(given))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m shardax.pipeline`: lists, draws and simulates schedules of pipelines.

    python -m shardax.pipeline list
    python -m shardax.pipeline draw zb-h1 --stages 4 --microbatches 8
    python -m shardax.pipeline draw my_schedule.txt --out mine.png
    python -m shardax.pipeline simulate --stages 4 --microbatches 16 --backward 2e-3 --send 1e-4
    python -m shardax.pipeline simulate 1f1b eager-1f1b --timeline

A schedule is a name, or a file with one line per stage: F0 F1 B0 B1, `-` for an idle tick.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardax.pipeline.draw import draw
from shardax.pipeline.packing import parse
from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.simulate import Candidate, Costs, choose, comparison, simulate
from shardax.pipeline.slots import tables
from shardax.pipeline.table import Schedule, grid
from shardax.pipeline.timeline import timeline


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        for text in options.run(options):
            print(text)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _list(options: argparse.Namespace) -> Iterator[str]:
    """Every schedule with a name, of these sizes."""
    p, m = options.stages, options.microbatches
    made = {name: make_schedule(name, p, m) for name in NAMES}  # errors come first
    yield f"{p} stages, {m} microbatches\n"
    yield f"{'schedule':12} {'chunks':>6} {'ticks':>6} {'idle':>7} {'waits':>6} {'keeps':>6}"
    for name, schedule in made.items():
        kept = max(tables(schedule).saved_slots)
        yield (
            f"{name:12} {schedule.chunks:6} {len(schedule.ticks):6} {100 * schedule.bubble:5.1f} % "
            f"{max(schedule.waits):6} {kept:6}  {NAMES[name].about}"
        )
    yield (
        "\nIdle: of all ticks of all stages. Waits: the most idle ticks of a stage between its first "
        "instruction and its last.\nKeeps: results of forward passes through a chunk that a stage keeps at "
        "once for backward passes."
    )


def _draw(options: argparse.Namespace) -> Iterator[str]:
    schedule = _schedule(options.schedule, options)
    yield grid(schedule, options.width)
    file = options.out or re.sub(r"[^\w-]+", "_", schedule.name) + ".png"
    try:
        draw(schedule, file)
    except OSError as error:
        raise ValueError(f"--out {file} cannot be written: {error.strerror}") from None
    yield f"\nwrote {file}"


def _simulate(options: argparse.Namespace) -> Iterator[str]:
    costs = Costs(
        options.forward,
        options.inputs,
        options.weights,
        options.backward,
        options.saved,
        options.send,
        options.boundary,
    )
    p, m, layers = options.stages, options.microbatches, options.layers or 4 * options.stages
    if options.schedule:
        made = [_schedule(name, options) for name in options.schedule]
        done = [simulate(s, costs.grouped(layers, s.virtual_stages), locked=not options.free) for s in made]
        limit = options.limit
        yield comparison([Candidate(d, limit is None or d.kept <= limit) for d in done])
        found = done
    else:
        choice = choose(
            p, m, layers, costs, limit=options.limit, locked=not options.free, latency=options.latency
        )
        yield str(choice)
        found = [c.simulation for c in choice.candidates if c.schedule is choice.schedule]
    if options.timeline:
        for each in found:
            yield "\n" + timeline(each, options.width)


def _schedule(name: str, options: argparse.Namespace) -> Schedule:
    if Path(name).is_file():
        return parse(Path(name).read_text(), Path(name).stem, options.chunks, latency=options.latency)
    chunks = options.chunks if name in NAMES and NAMES[name].any_chunks else None
    return make_schedule(name, options.stages, options.microbatches, chunks, latency=options.latency)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardax.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for run, about in (
        (_list, "prints those with names"),
        (_draw, "prints and draws one"),
        (_simulate, "compares them"),
    ):
        command = commands.add_parser(run.__name__[1:], help=about, description=about)
        command.set_defaults(run=run)
        command.add_argument("--stages", type=int, default=4)
        command.add_argument("--microbatches", type=int, default=8)
        if run is _list:
            continue
        command.add_argument("schedule", nargs="*" if run is _simulate else None, help="a name, or a file")
        command.add_argument("--chunks", type=int, help="pieces of the model on each stage")
        command.add_argument("--latency", type=int, default=1, help="2: sends overlap with the next tick")
        command.add_argument("--width", type=int, default=shutil.get_terminal_size().columns, help="of lines")
        if run is _draw:
            command.add_argument("--out", help="the picture's file (NAME.png)")
        else:
            _add_costs(command)
    return parser


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--layers", type=int, help="of the model (4 per stage)")
    command.add_argument("--limit", type=float, help="bytes that a stage may keep")
    command.add_argument(
        "--free", action="store_true", help="each stage on its own, not in ticks of all stages"
    )
    command.add_argument("--timeline", action="store_true", help="print timelines too")
    for name, default, about in (
        ("forward", 1e-3, "seconds of a layer and microbatch, forward"),
        ("inputs", 1e-3, "seconds of its backward pass for the inputs"),
        ("weights", 1e-3, "seconds of its backward pass for the weights"),
        ("backward", None, "seconds of its whole backward pass (the sum of both)"),
        ("send", 0.0, "seconds of a send to the neighbour"),
        ("saved", float(1 << 20), "bytes that it keeps for the backward pass"),
        ("boundary", 0.0, "bytes of what is sent"),
    ):
        command.add_argument(f"--{name}", type=float, default=default, help=about)


if __name__ == "__main__":
    sys.exit(main())

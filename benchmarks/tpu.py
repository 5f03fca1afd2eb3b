"""What XLA's partitioner and ours make of the same train step on a TPU, as the TPU compiler sees it. Needs no
TPU.

`python -m benchmarks.tpu WORKLOAD...` compiles each workload twice, by `jax.jit` and by `shard_jit` with the
same annotations, and prints side by side what a device sends, the seconds that a step would take, peak HBM,
how large the program is, and the processor seconds of each stage on the way. It needs the `tpu` extra, for
its libtpu. `--list` shows the workloads; `all` stands for all of them. The exit status is 1 if something does
not compile, which does not keep the rest from being measured.

Estimated seconds are the compiler's cycles over the clock, and the bytes sent over the links of one axis,
nothing overlapped. Pipelined workloads compare several programs. Ours are counted tick by tick, each as long
as the longest of the branches that stages take in it by the schedule's table, and what all do besides; in a
shifting buffer all stages compute in all ticks.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks import ticks
from benchmarks.hlo_cost import Cost, branches, cost
from benchmarks.workload import Published, Step, Way, Workload
from benchmarks.workloads import workloads

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute", "broadcast")
WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so several processes may compile at once
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

Figures = dict[str, float]
"""By the name of a row, which has the unit."""


def main(argv: Sequence[str] | None = None) -> int:
    known = workloads()
    args = _parse(argv, known)
    if args.list:
        print(
            "\n".join(
                f"{name:<{max(map(len, known))}}  {heading(workload)}" for name, workload in known.items()
            )
        )
        return 0
    os.environ |= WITHOUT_TPU  # libtpu reads them when it is first asked for a topology
    jax.config.update("jax_platforms", "cpu")
    measurements: dict[str, Any] = {}
    for name in known if "all" in args.workloads else args.workloads:
        measurements[name] = columns = compare(known[name], args.keep, args.rounds, args.ways)
        print(f"{name}: {heading(known[name])}\n{table(columns)}\n", flush=True)
        if args.json:
            write(args.json, measurements)
    return int(any(not figures for columns in measurements.values() for figures in columns.values()))


def _parse(argv: Sequence[str] | None, known: Mapping[str, Workload]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    parser.add_argument("--list", action="store_true", help="show the workloads, and compile nothing")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there, after each workload anew"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="of which the seconds of stages are the median (default: 1)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write the compiled programs and the plans there, as text"
    )
    parser.add_argument("--ways", metavar="NAMES", help="of the columns these two or more: 'jax.jit,zero 3'")
    args = parser.parse_args(argv)
    args.ways = args.ways and args.ways.split(",")
    for workload in args.workloads if args.ways else ():
        ways = known[workload].ways if workload in known else args.ways
        if len(args.ways) < 2 or not {*args.ways} <= {*ways}:
            parser.error(
                f"--ways {','.join(args.ways)}: name two or more of {', '.join(ways)}, of {workload}"
            )
    if unknown := [name for name in args.workloads if name not in known and name != "all"]:
        parser.error(f"no such workload: {', '.join(unknown)} (--list shows them)")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: name 1 or more")
    if not args.workloads and not args.list:
        parser.error("name a workload (--list shows them)")
    return args


def heading(workload: Workload) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in workload.axes.items())
    return f"{workload.what}, on {workload.topology} as {mesh}"


def compare(
    workload: Workload, keep: Path | None = None, rounds: int = 1, ways: Sequence[str] | None = None
) -> dict[str, Figures]:
    """The columns: what each partitioner makes of it, nothing where it does not compile, and what a paper
    measured.
    """
    config = {"chip_config_name": "megacore"} if workload.topology.startswith("v4") else {}
    topology = topologies.get_topology_desc(workload.topology, "tpu", **config)
    mesh = topologies.make_mesh(topology, tuple(workload.axes.values()), tuple(workload.axes))
    rounds_of: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for name in ways or workload.ways:
            way = workload.ways[name]
            step = way.step(mesh)
            jitted = (
                by_jit(step, mesh)
                if way.partitioner == "jax.jit"
                else by_shard_jit(step, mesh, way.transforms)
            )
            rounds_of.setdefault(name, []).append(measured(workload, name, jitted, step.args, keep))
    columns = {name: medians(figures) for name, figures in rounds_of.items()}
    return columns | ({"paper": published(workload.published)} if workload.published else {})


def medians(rounds: Sequence[Figures]) -> Figures:
    """The medians of the rounds; only the seconds of the stages differ between them."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def by_jit(step: Step, mesh: Mesh):
    named = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), step.specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
    return jax.jit(step.run, in_shardings=named, donate_argnums=(0, 1))


def by_shard_jit(step: Step, mesh: Mesh, transforms: Sequence[Any] = ()):
    how = {"mesh": mesh, "in_shardings": step.specs, "donate_argnums": (0, 1), "transforms": transforms}
    return sx.shard_jit(step.run, **how, options=sx.Options(chip="devices"))


def measured(workload: Workload, name: str, jitted: Any, args: tuple, keep: Path | None) -> Figures:
    """By one of the workload's ways. Nothing where it does not compile."""
    way, file = workload.ways[name], f"{workload.name}.{name.replace(' ', '-')}"
    jax.clear_caches()
    seconds = dict.fromkeys(map("seconds to {}".format, ("trace", "plan", "lower", "compile")), 0.0)
    timed(seconds, "trace", lambda: jitted.trace(*args))
    if way.partitioner != "jax.jit":  # XLA plans while it compiles
        plan = timed(seconds, "plan", lambda: jitted.plan(*args))
        keep_text(keep, f"{file}.plan", str(plan))
    lowered = timed(seconds, "lower", lambda: jitted.lower(*args))
    try:
        compiled = timed(seconds, "compile", lowered.compile, time.process_time)
    except jax.errors.JaxRuntimeError as error:
        print(f"{workload.name} does not compile by {name}: {str(error)[:400]}", file=sys.stderr)
        return {}
    text = compiled.as_text()
    keep_text(keep, f"{file}.hlo", text)
    seconds["seconds of all stages"] = sum(seconds.values())
    memory = {"peak HBM, GiB": peak_memory(compiled), "of it in use at once": in_use(compiled)}
    gigabytes = {name: nbytes / 2**30 for name, nbytes in memory.items()}
    total = figures(workload, cost(text, way.table, workload.chip))
    return total | idle(workload, way, text) | gigabytes | {"code, MiB": code(compiled) / 2**20} | seconds


def idle(workload: Workload, way: Way, text: str) -> Figures:
    """Of a pipelined program: the share of time that stages wait, or compute what nobody wants."""
    share = way.bubbles
    if way.table is not None:
        share = ticks.bubbles(way.table, branches(text, way.table, workload.chip), workload.chip)
    return {"bubbles, %": 100 * share} if share is not None else {}


def keep_text(folder: Path | None, name: str, text: str) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def timed(
    seconds: Figures, stage: str, run: Callable[[], Any], clock: Callable[[], float] = time.thread_time
) -> Any:
    """Of this thread alone, but for XLA's compiler, which has several: those of a compilation before go on
    for a while, which is no time of what comes after it."""
    start = clock()
    result = run()
    seconds[f"seconds to {stage}"] = clock() - start
    return result


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes in HBM of arguments, results that are not among them, and temporaries."""
    stats: Any = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def code(compiled: jax.stages.Compiled) -> int:
    """Bytes of the program itself. What it takes to compile grows with them, and no other process that the
    machine runs changes them."""
    stats: Any = compiled.memory_analysis()
    return stats.generated_code_size_in_bytes


def in_use(compiled: jax.stages.Compiled) -> int:
    """Bytes in HBM of all that is alive at once, where that is most. The rest of the peak is gaps between
    what is alive, as the compiler has placed it.
    """
    stats: Any = compiled.memory_analysis()
    return stats.peak_memory_in_bytes


def figures(workload: Workload, total: Cost) -> Figures:
    seconds, computing = total.seconds(workload.chip), total.compute_seconds(workload.chip)
    row = {f"GB sent by {kind}": total.sent[kind] / 1e9 for kind in KINDS}
    row |= {"GB sent in all": total.sent.total() / 1e9, "collectives run": total.times.total()}
    row |= {"seconds": seconds, "of them computing": computing, "of them sending": seconds - computing}
    if workload.published:
        row["error against the paper, %"] = 100 * (seconds / workload.published.seconds - 1)
    return row | {"MFU, %": 100 * workload.utilization(seconds)}


def published(paper: Published) -> Figures:
    shares = {"MFU, %": paper.utilization, "bubbles, %": paper.bubbles}
    known = {name: 100 * share for name, share in shares.items() if share is not None}
    memory = {} if paper.memory is None else {"peak HBM, GiB": paper.memory}
    return {"seconds": paper.seconds, **known, **memory}


def table(columns: Mapping[str, Figures]) -> str:
    """One row for each figure that is not zero in all columns; the second column over the first at the
    right.
    """
    figure_names = dict.fromkeys(name for figures in columns.values() for name in figures)
    rows = [_row("", [*columns, "ratio"])]
    for name in figure_names:
        values = [figures.get(name) for figures in columns.values()]
        if any(values):
            first, second, *_ = values
            ratio = (
                second / first if first and second and "%" not in name else None
            )  # a share says more by itself
            rows.append(_row(name, [_number(value) for value in values] + [f"{ratio:.3f}" if ratio else ""]))
    return "\n".join(rows)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<28}" + "".join(f"{cell:>12}" for cell in cells).rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:#.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def write(path: Path, measurements: Mapping[str, Any]) -> None:
    """Beside the file, then renamed: it is never there in part."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(measurements, indent=1) + "\n")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())

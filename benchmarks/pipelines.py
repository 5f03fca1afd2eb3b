"""The pipelined train steps that `python -m benchmarks.tpu` compiles: GSPMD's Tables 4 and 5, by a shifting
buffer and by schedules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks import conformer_pipelined, gspmd_model, gspmd_pipelined
from benchmarks.conformer_pipelined import AGAIN
from benchmarks.ticks import branch_table
from benchmarks.workload import TOPOLOGIES, Published, Step, Way, Workload
from models import conformer
from shardax.pipeline.schedules import make_schedule

Run = Callable[..., tuple[Any, Any, Any]]

CONFORMERS = {
    "interleaved": ("interleaved", 4, "least"),
    "remat all": ("interleaved", 4, "all"),
    "eager-1f1b": ("eager-1f1b", 1, "all"),
}
"""Beside the buffer: schedule, chunks, and what of a layer is computed again."""

NARROW = gspmd_model.Dims(L=64, B=1024, M=4096, N=64, D=128, H=16384)


def tiny() -> Workload:
    dims = gspmd_model.Dims(L=4, B=32, M=512, N=8, D=64, H=2048, S=256, V=1024)
    return _transformer("tiny-pipelined", "GSPMD's model, small", (2, 2, 2), 4, dims, None)


def table_4() -> Iterator[Workload]:
    for sizes, microbatches, published in (
        ((2, 16, 8), 16, Published(24.0, bubbles=0.056)),
        ((4, 16, 4), 16, Published(22.3, bubbles=0.148)),
        ((4, 16, 4), 32, Published(22.2, bubbles=0.080)),
        ((8, 16, 2), 32, Published(23.4, bubbles=0.165)),
        ((8, 8, 4), 32, Published(23.7, bubbles=0.161)),
    ):
        name = f"table4-16b-{'x'.join(map(str, sizes))}-{microbatches}"
        yield _transformer(name, "GSPMD's Table 4", sizes, microbatches, NARROW, published)


def table_5() -> Iterator[Workload]:
    for size, layers, stages, microbatches, repeats, published in (
        ("6b", 32, 8, 64, 1, Published(8.40, memory=13.8, bubbles=0.096)),
        ("6b", 32, 8, 16, 1, Published(2.80, memory=12.2, bubbles=0.299)),
        ("6b", 32, 8, 16, 4, Published(2.30, memory=14.1, bubbles=0.090)),
        ("13b", 64, 16, 128, 1, Published(18.37, memory=15.4, bubbles=0.104)),
        ("13b", 64, 16, 32, 1, Published(5.58, memory=12.8, bubbles=0.310)),
        ("13b", 64, 16, 32, 4, Published(4.42, memory=14.8, bubbles=0.100)),
    ):
        how = "gpipe" if repeats == 1 else "circular"
        c = conformer_pipelined.config(layers)
        yield _conformer(
            f"conformer-{size}-{how}-{microbatches}", c, stages, microbatches, repeats, published
        )


def _transformer(name, what, sizes, microbatches: int, dims, published) -> Workload:
    stages, x, y = sizes
    args = gspmd_model.abstract_args(dims)
    specs = gspmd_pipelined.param_specs(), None, P("x")

    def buffered(mesh: Mesh) -> Step:
        return Step(partial(gspmd_pipelined.buffered_step, mesh, microbatches, 1, "all"), args, specs)

    def scheduled(again: str, how: Mapping[str, Any], mesh: Mesh) -> Step:
        return Step(partial(gspmd_pipelined.pipelined_step, mesh, how, again), args, specs)

    def in_chunks(how: Mapping[str, Any], mesh: Mesh) -> Step:
        params, specs_at_rest = gspmd_pipelined.packed(mesh, how, "less", args[0], args[2])
        state = params, jax.eval_shape(gspmd_model.OPTIMIZER.init, params), args[2]
        run = partial(gspmd_pipelined.pipelined_step, mesh, how, "less")
        return Step(run, state, (specs_at_rest, None, P("x")))

    ways = {"buffer": Way("jax.jit", buffered, bubbles=_gpipe_bubbles(stages, microbatches, 1))}
    less = {"remat less": "less", "remat least": "least"}
    for name_of_way, again in ({"eager-1f1b": "all"} | (less if published else {})).items():
        ways[name_of_way] = _scheduled(partial(scheduled, again), stages, microbatches, "eager-1f1b", 1)
    if published:
        ways["interleaved"] = _scheduled(in_chunks, stages, microbatches, "interleaved", 2)
    axes = {"stage": stages, "x": x, "y": y}
    topology = TOPOLOGIES[stages * x * y]
    return Workload(name, what, topology, axes, buffered, gspmd_model.flops(dims), published, ways)


def _conformer(
    name, c: conformer.Config, stages: int, microbatches: int, repeats: int, published
) -> Workload:
    args = conformer_pipelined.abstract_args(c, microbatches)
    layers_on_stages = {
        part: jax.tree.map(lambda _, part=part: P("stage") if part == "layers" else P(), leaves)
        for part, leaves in args[0].items()
    }

    def buffered(again: str, mesh: Mesh) -> Step:
        run = partial(conformer_pipelined.buffered_step, mesh, replace(c, kept=AGAIN[again]), repeats)
        return Step(run, args, (layers_on_stages, None, P("stage")))

    def scheduled(again: str, how: Mapping[str, Any], mesh: Mesh) -> Step:
        own = replace(c, kept=AGAIN[again])
        run = partial(conformer_pipelined.pipelined_step, own, how)
        if how["chunks"] == 1:
            return Step(run, args, (layers_on_stages, None, P()))
        params, specs = conformer_pipelined.packed(mesh, own, how, args[0], args[2])
        return Step(
            run, (params, jax.eval_shape(gspmd_model.OPTIMIZER.init, params), args[2]), (specs, None, P())
        )

    bubbles = _gpipe_bubbles(stages, microbatches, repeats)
    ways = {"buffer": Way("jax.jit", partial(buffered, "all"), bubbles=bubbles)}
    for name_of_way, (schedule, chunks, again) in CONFORMERS.items():
        ways[name_of_way] = _scheduled(partial(scheduled, again), stages, microbatches, schedule, chunks)
    ways["buffer remat less"] = Way("jax.jit", partial(buffered, "less"), bubbles=bubbles)
    flops = conformer_pipelined.flops(c, microbatches)
    what = "the Conformer of GSPMD's Table 5"
    return Workload(
        name, what, TOPOLOGIES[stages], {"stage": stages}, partial(buffered, "all"), flops, published, ways
    )


def _scheduled(step: Callable[..., Step], stages: int, microbatches: int, schedule: str, chunks: int) -> Way:
    how = {"microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    return Way(
        "shard_jit",
        partial(step, how),
        lambda: branch_table(make_schedule(schedule, stages, microbatches, chunks)),
    )


def _gpipe_bubbles(stages: int, microbatches: int, repeats: int) -> float:
    """The share of the ticks of a shifting buffer in which a stage computes what nobody wants.

    >>> _gpipe_bubbles(4, 12, 1)
    0.2
    """
    return (stages - 1) / (repeats * microbatches + stages - 1)

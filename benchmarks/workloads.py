"""The train steps that `python -m benchmarks.tpu` compiles: their sizes and meshes, and what papers say of
them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks import fully_sharded, gspmd_model, llama, pipelines
from benchmarks.workload import TOPOLOGIES, Published, Step, Workload
from models.rules import on_axes


@cache
def workloads() -> dict[str, Workload]:
    """All of them, by name."""
    dims = gspmd_model.Dims(L=2, B=8, M=512, N=8, D=64, H=2048, S=256, V=1024)
    tiny = _gspmd("tiny", "GSPMD's model, small", (2, 4), dims, None)
    unpipelined = tiny, *_table_2(), *_table_3(), *_table_1(), *_llamas()
    pipelined = pipelines.tiny(), *pipelines.table_4(), *pipelines.table_5()
    all_workloads = *unpipelined, *pipelined, *fully_sharded.fully_sharded()
    return {workload.name: workload for workload in all_workloads}


_WIDE = gspmd_model.Dims(L=32, B=64, M=8192, N=128, D=256, H=65536)
_NARROW = gspmd_model.Dims(L=64, B=48, M=4096, N=64, D=128, H=16384)


def _table_2() -> Iterator[Workload]:
    for name, sizes, dims, published in (
        ("64b-8x16", (8, 16), _WIDE, Published(5.74, 0.627, 15.3)),
        ("64b-16x32", (16, 32), replace(_WIDE, B=256), Published(6.25, 0.571, 13.3)),
        ("64b-32x64", (32, 64), replace(_WIDE, B=1024), Published(6.30, 0.569, 15.56)),
        ("128b-32x64", (32, 64), replace(_WIDE, L=64, B=512), Published(6.31, 0.565, 14.0)),
        ("256b-32x64", (32, 64), replace(_WIDE, L=128, B=256), Published(6.71, 0.541, 12.9)),
        ("512b-32x64", (32, 64), replace(_WIDE, L=256, B=128), Published(7.64, 0.475, 13.6)),
        (
            "1t-32x64",
            (32, 64),
            replace(_WIDE, L=128, B=128, M=16384, N=256, H=131072),
            Published(12.66, 0.556, 15.8),
        ),
    ):
        yield _gspmd(f"table2-{name}", "GSPMD's Table 2", sizes, dims, published)


def _table_3() -> Iterator[Workload]:
    for sizes, batch, published in (
        ((4, 16), 48, Published(3.56, 0.394, 12.4)),
        ((8, 16), 96, Published(3.43, 0.405, 14.6)),
        ((8, 32), 192, Published(5.71, 0.271, 14.8)),
        ((16, 4), 48, Published(3.10, 0.457, 13.8)),
        ((16, 8), 96, Published(3.37, 0.417, 12.7)),
        ((32, 8), 192, Published(3.36, 0.413, 14.1)),
    ):
        x, y = sizes
        yield _gspmd(f"table3-16b-{x}x{y}", "GSPMD's Table 3", sizes, replace(_NARROW, B=batch), published)


def _table_1() -> Iterator[Workload]:
    """On the first column of Table 2; "finalized" is that column."""
    for name, activations in (("attempt-1", gspmd_model.ATTEMPT_1), ("attempt-2", gspmd_model.ATTEMPT_2)):
        yield _gspmd(
            f"table1-{name}", f"GSPMD's Table 1, {name.replace('-', ' ')}", (8, 16), _WIDE, None, activations
        )
    yield _gspmd("table1-finalized", "GSPMD's Table 1, finalized", (8, 16), _WIDE, None)


def _gspmd(
    name, what, sizes: tuple[int, int], dims, published, activations=gspmd_model.FINALIZED
) -> Workload:
    def step(mesh: Mesh) -> Step:
        specs = gspmd_model.param_specs(), None, P("x")
        return Step(
            partial(gspmd_model.train_step, mesh, activations), gspmd_model.abstract_args(dims), specs
        )

    x, y = sizes
    return Workload(name, what, TOPOLOGIES[x * y], {"x": x, "y": y}, step, gspmd_model.flops(dims), published)


def _llamas() -> Iterator[Workload]:
    eight_b = llama.Dims(L=32, B=64, M=4096, K=8, G=4, D=128, H=14336)
    one_b = llama.Dims(L=16, B=128, M=2048, K=8, G=4, D=64, H=8192)
    yield _llama(
        "llama-8b", "Llama 3 8B, fully sharded and tensor parallel", {"fsdp": 16, "model": 4}, eight_b
    )
    yield _llama(
        "llama-1b-accumulated", "Llama 3 1B, data parallel, 8 microbatches", {"data": 64}, replace(one_b, A=8)
    )


def _llama(
    name: str, what: str, axes: Mapping[str, int], dims: llama.Dims, topology: str = "v5p:4x4x4"
) -> Workload:
    accumulated = dims.A > 1
    run, text = (llama.accumulated_step, "ABS") if accumulated else (llama.train_step, "BS")
    batch = on_axes(P(None, *llama.BATCH) if accumulated else llama.BATCH, axes)

    def step(mesh: Mesh) -> Step:
        params = llama.param_shapes(dims)
        state = jax.eval_shape(llama.OPTIMIZER.init, params)
        args = params, state, jax.ShapeDtypeStruct(dims.shape(text), jnp.int32)
        return Step(partial(run, mesh), args, (llama.param_specs(axes), None, batch))

    return Workload(name, what, topology, axes, step, llama.flops(dims))

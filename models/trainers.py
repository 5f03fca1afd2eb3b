"""Three ways to run one job: by shardax, by XLA's partitioner with the same shardings, and on one device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.gpt2_sharding import BATCH, PARAMS, Offload, sharded_step
from models.job import Job
from models.rules import on_axes, path_name, specs_by_path
from models.steps import Init, State, Step


@dataclass(frozen=True)
class Trainer:
    """A job's functions, compiled."""

    name: str
    init: Init
    step: Step
    loss: Callable[[Any, Any], Array]
    next_token: Callable[[Any, Any, Array], Array]
    state: Any = None  # shapes, dtypes and shardings of the state at rest, where there is a mesh
    batch: NamedSharding | None = None  # at rest
    plan: Any = None  # of the step
    dropped: tuple[str, ...] = ()  # what XLA does not split, and why


def by_shardax(job: Job, mesh: Mesh, zero: int = 0, offload: Offload = ()) -> Trainer:
    """The state rests as completion infers from the train step, from its first moment; parameters at the host
    are brought where the held-out loss and the sample read them, too.
    """
    step = sharded_step(job.pipelined or job.step, job.state, mesh, zero, offload)
    at_host = [sx.zero.AtHost("params")] if "parameters" in offload else []
    batch = on_axes(BATCH, mesh.axis_names)
    plan = step.plan(job.state, job.batch)
    state, batch_at_rest = plan.in_shardings
    return Trainer(
        name="shardax",
        init=sx.shard_jit(job.init, mesh=mesh, out_shardings=state),
        step=step,
        loss=sx.shard_jit(job.loss, mesh=mesh, in_shardings=(state.params, batch), transforms=at_host),
        next_token=sx.shard_jit(
            job.next_token, mesh=mesh, in_shardings=(state.params, P(), P()), transforms=at_host
        ),
        state=jax.tree.map(_sharded, job.state, state),
        batch=batch_at_rest,
        plan=plan,
    )


def by_xla(job: Job, mesh: Mesh) -> Trainer:
    """`jax.jit` takes no dim that an axis does not divide: such axes are dropped, and reported."""
    specs = specs_by_path(PARAMS, job.state, mesh.axis_names)
    state = jax.tree.map(
        lambda spec, leaf: NamedSharding(mesh, dividing(spec, leaf.shape, mesh)), specs, job.state
    )
    batch = NamedSharding(mesh, dividing(on_axes(BATCH, mesh.axis_names), job.batch.shape, mesh))
    replicated = NamedSharding(mesh, P())
    return Trainer(
        name="xla",
        init=jax.jit(job.init, out_shardings=state),
        step=jax.jit(
            job.step, in_shardings=(state, batch), out_shardings=(state, replicated), donate_argnums=0
        ),
        loss=jax.jit(job.loss, in_shardings=(state.params, batch)),
        next_token=jax.jit(job.next_token, in_shardings=(state.params, replicated, replicated)),
        state=jax.tree.map(_sharded, job.state, state),
        batch=batch,
        dropped=tuple(_dropped(specs, job.state, mesh)),
    )


def on_one_device(job: Job) -> Trainer:
    step = jax.jit(job.step, donate_argnums=0)
    return Trainer("one device", jax.jit(job.init), step, jax.jit(job.loss), jax.jit(job.next_token))


def _sharded(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def dividing(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the entries whose axes do not divide their dim."""
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    shards = [math.prod(mesh.shape[axis] for axis in of_dim) for of_dim in axes]
    pairs = zip(spec, shape, shards, strict=False)
    return P(*(entry if size % count == 0 else None for entry, size, count in pairs))


def _dropped(specs: State, state: State, mesh: Mesh):
    for (path, leaf), spec in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(specs), strict=True):
        kept = dividing(spec, leaf.shape, mesh)
        if kept != spec:
            yield f"{path_name(path)} {leaf.dtype}{list(leaf.shape)}: {spec} becomes {kept}"

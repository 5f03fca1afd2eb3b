"""Pipeline: the transform that spreads the layers of a training step, as it stands, over stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.annotations.annotate import annotate_p, bind_annotation, describe
from shardax.annotations.explicit import shape_of
from shardax.differentiated import is_transposed
from shardax.pipeline.batch import check_names, of_batch
from shardax.pipeline.printed import without_callbacks
from shardax.pipeline.resting import Weights
from shardax.pipeline.schedules import check_schedule
from shardax.pipeline.scopes import patterns
from shardax.pipeline.split import Split
from shardax.pipeline.virtual import microbatch
from shardax.spmd_rules.equations import LOOPS
from shardax.transforms import Context, annotations_of
from shardax.validation import is_integer, require


@dataclass(frozen=True)
class Pipeline:
    """A transform of training steps, by which layers lie on the stages of a mesh axis and microbatches pass
    them one after the other: `shardax.pipeline.value_and_grad` without any change of the step.

    It finds the forward pass, the backward pass and the update in the program of the step. What it makes of
    the batch has to be sums over its rows, as means are; what is made of them, as the update, gradient
    clipping or a scaled loss, is done once, after all microbatches. Microbatch i of m has the i-th of m equal
    parts of the rows; random bits are those of the step as it stands. Of packed parameters the loss has
    `sx.pipeline.unpack`, which sends nothing: each stage reads its own.

    Args:
      axis: of the mesh, along which the stages lie.
      microbatches: how many.
      schedule, chunks: as in `shardax.pipeline.value_and_grad`.
      batch_argnames: of the step's arguments whose arrays have a row for each row of the batch. None: the
        first array that is no state and has a row for each microbatch, and all with as many rows.
      at: as in `shardax.pipeline.value_and_grad`.

    Raises ValueError: where there is no such schedule; where the axis is not in the mesh, or an annotation
    inside names it; where no backward pass is found; where the step is no sum over microbatches, with the
    line; where there are more stages than places to cut.

    >>> import shardax as sx
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> def step(params, x):
    ...     layer = lambda x, w: (jax.numpy.tanh(x @ w), None)
    ...     loss = lambda params: (jax.lax.scan(layer, x, params)[0] ** 2).mean()
    ...     value, gradient = jax.value_and_grad(loss)(params)
    ...     return params - 0.1 * gradient, value
    >>> how = {"mesh": mesh, "in_shardings": (jax.P("stage"), None), "donate_argnums": 0}
    >>> train = sx.shard_jit(step, transforms=[sx.pipeline.Pipeline(microbatches=8)], **how)
    >>> params, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    >>> sorted({c.kind for c in train.plan(params, x).collectives})
    ['all_reduce', 'ppermute']
    """

    axis: str = "stage"
    microbatches: int = 1
    schedule: Any = "1f1b"
    chunks: int | None = None
    batch_argnames: str | Sequence[str] | None = None
    at: str | Sequence[str] | None = None
    lays_on_stages: ClassVar[bool] = True

    def __post_init__(self):
        require(isinstance(self.axis, str), "axis of Pipeline", self.axis, "the name of a mesh axis")
        is_count = is_integer(self.microbatches, 1)
        require(is_count, "microbatches of Pipeline", self.microbatches, "an int of 1 or more")
        # programs that are made with numpy's numbers have other types
        object.__setattr__(self, "microbatches", int(self.microbatches))
        check_schedule(self.schedule, "schedule of Pipeline")
        check_names(self.batch_argnames, "Pipeline")
        patterns(self.at, "Pipeline")

    def __str__(self):
        return f"Pipeline(axis={self.axis!r}, microbatches={self.microbatches}, schedule={self.schedule!r})"

    def __call__(self, jaxpr, context: Context):
        stages = self._stages(context.mesh)
        self._check_annotations(jaxpr)
        jaxpr = _jax.dce(jaxpr)
        self._check_equations(jaxpr)
        context = _knowing_state(context)
        is_batch = self._is_batch(context)
        quiet, called = without_callbacks(jaxpr)
        program = microbatch(quiet, context, is_batch, self.microbatches)
        pairs = list(zip(context.arguments, is_batch, strict=True))
        params = [a.is_state and a.type.ndim > 0 and not taken for a, taken in pairs]
        names = [a.path for a, taken in pairs if taken]
        split = Split(program, params, is_batch, names, at=patterns(self.at, "Pipeline"), called=called)

        def pipelined(region, arguments, batch, rest, asked):
            if not region.flow.parts:
                raise ValueError(self._nothing_of_the_batch(names))
            if not region.flow.backward:
                raise ValueError(self._no_backward_pass())
            schedule, told = region.schedule(self.schedule, stages, self.microbatches, self.chunks, self.axis)
            weights = Weights.of(arguments, stages, self.axis)
            how = {"asked": asked, "told": told, "dim": program.batch_dim}
            return region.run(schedule, weights, batch, rest, self.axis, **how)

        arguments, results = _at_ends(jaxpr)

        def microbatches(i: int, x):
            return self._microbatches(x, arguments[i], program.batch_dim)

        def run(*args):
            args = [_annotated(x, note) for x, note in zip(args, arguments, strict=True)]
            found = split.run(args, self.microbatches, microbatches, pipelined)
            return [_annotated(x, note) for x, note in zip(found, results, strict=True)]

        mesh = context.mesh.abstract_mesh if isinstance(context.mesh, Mesh) else context.mesh
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.make_jaxpr(run)(*map(shape_of, jaxpr.in_avals))

    def _microbatches(self, x, note: dict[str, Any] | None, dim: int):
        """[batch, ...] -> [microbatches, rows, ...]: of rows one after the other, or, where it does not
        matter which, [rows, microbatches, ...]: of rows so far apart that those of each device stay there."""
        lead = (self.microbatches, -1) if dim == 0 else (-1, self.microbatches)
        x = x.reshape(*lead, *x.shape[1:])
        if note is None:
            return x
        dims = list(note["dims"])
        dims.insert(dim, ())
        return _annotated(x, {**note, "dims": tuple(dims), "role": "inside", "like": None})

    def _stages(self, mesh: Mesh | AbstractMesh) -> int:
        if self.axis not in mesh.shape:
            raise ValueError(
                f"axis of Pipeline is {self.axis!r}, and the mesh ({describe(mesh)}) has no axis "
                f"{self.axis!r}: name the axis along which the stages are to lie"
            )
        return mesh.shape[self.axis]

    def _check_annotations(self, jaxpr) -> None:
        for eqn, annotation in annotations_of(jaxpr):
            if annotation.is_inside and self.axis in (a for axes in annotation.dims for a in axes or ()):
                line = _jax.user_line(eqn.source_info) or "an unknown line"
                raise ValueError(
                    f"{annotation.source} at {line} splits a dim over {self.axis!r}, along which the "
                    "pipeline's stages lie; name another axis there, or leave it out"
                )

    def _check_equations(self, jaxpr) -> None:
        """Raises ValueError where there is a pipeline already, or no backward pass that can be cut."""
        equations = list(_with_loops(jaxpr.jaxpr))
        for eqn, _ in equations:
            if self.axis in eqn.params.get("newly_manual_axes", ()):
                line = _jax.user_line(eqn.source_info)
                already = (
                    f"has a jax.shard_map over {self.axis!r} already, at {line}, as "
                    "sx.pipeline.value_and_grad makes one"
                )
                if not line:
                    already = f"is pipelined over {self.axis!r} already, as by another Pipeline"
                raise ValueError(f"{self}: the step {already}; keep one of them")
        found = [(eqn, loop) for eqn, loop in equations if is_transposed(eqn.source_info.name_stack)]
        if not found:
            raise ValueError(self._no_backward_pass())
        eqn, loop = found[0]
        if loop is not None and all(other is not None for _, other in found):
            line = _jax.user_line(_jax.with_user_frame(eqn, [loop])) or "an unknown line"
            raise ValueError(
                f"{self}: the backward pass, at {line}, stands inside a {loop.primitive.name}, and one loop "
                "has to run all microbatches; where the loop adds up gradients of parts of the batch, leave "
                "it out and give Pipeline more microbatches; else call sx.pipeline.value_and_grad in it"
            )

    def _no_backward_pass(self) -> str:
        return (
            f"{self}: no backward pass is found in the step (equations that JAX transposed, of the batch); "
            "expected a training step with jax.grad or jax.value_and_grad in it; for inference take "
            "sx.pipeline.apply, for a backward pass by hand sx.pipeline.value_and_grad"
        )

    def _nothing_of_the_batch(self, names: Sequence[str]) -> str:
        return (
            f"{self}: nothing in the forward pass depends on the batch, as which {', '.join(names)} is "
            "taken; say by batch_argnames= which arguments have a row for each row of the batch"
        )

    def _is_batch(self, context: Context) -> list[bool]:
        """Of each argument, whether its first dim is that of the batch."""
        arguments = context.arguments
        names, types = [a.path.partition("/")[0] for a in arguments], [a.type for a in arguments]
        is_free = [not a.is_state for a in arguments]
        found = of_batch(names, types, is_free, self.batch_argnames, "Pipeline", self.microbatches)
        if not any(found):
            raise ValueError(
                f"{self}: no batch is found among the arguments ({', '.join(a.path for a in arguments)}); "
                "expected an array that is no state, so that none of its type comes back; if one does, say "
                "batch_argnames="
            )
        name, rows = next((a.path, a.type.shape[0]) for a, ok in zip(arguments, found, strict=True) if ok)
        if rows < self.microbatches:
            raise ValueError(
                f"{self}: the batch has {rows} rows (the first dim of {name}), and there are "
                f"{self.microbatches} microbatches; take as many microbatches as rows at most, or say by "
                "batch_argnames= which arguments have a row for each row of the batch"
            )
        return found


def _knowing_state(context: Context) -> Context:
    """With state: where no argument counts as state, as one array of weights beside several of a batch does
    not that nobody donates, those are that come back. For a step with a backward pass has some.
    """
    if any(a.is_state for a in context.arguments):
        return context
    results = {(r.type.shape, r.type.dtype) for r in context.results}
    arguments = tuple(
        replace(a, is_state=a.type.ndim > 0 and (a.type.shape, a.type.dtype) in results)
        for a in context.arguments
    )
    return replace(context, arguments=arguments)


def _with_loops(jaxpr, loop: Any = None) -> Iterator[tuple[Any, Any]]:
    """The equations, those in bodies too, each with the outermost loop or branch that it is in, or None."""
    for eqn in jaxpr.eqns:
        yield eqn, loop
        own = loop or (eqn if eqn.primitive.name in LOOPS else None)
        for body in jaxprs_in_params(eqn.params):
            yield from _with_loops(body, own)


def _at_ends(jaxpr) -> tuple[list[Any], list[Any]]:
    """The annotations of arguments and of results, None where there is none."""
    of_arguments, of_results = {}, {}
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive is annotate_p and eqn.params["role"] not in ("inside", "state"):
            if eqn.invars[0] in jaxpr.jaxpr.invars:
                of_arguments[eqn.invars[0]] = eqn.params
            elif eqn.outvars[0] in jaxpr.jaxpr.outvars:
                of_results[eqn.outvars[0]] = eqn.params
    return (
        [of_arguments.get(v) for v in jaxpr.jaxpr.invars],
        [None if _jax.is_literal(v) else of_results.get(v) for v in jaxpr.jaxpr.outvars],
    )


def _annotated(x, note: dict[str, Any] | None):
    return x if note is None else bind_annotation(x, **note)

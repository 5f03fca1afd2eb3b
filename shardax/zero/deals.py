"""Deals: of an optimizer alone, which of its state may rest in stacks, and whether its update is faster with
them.

The update is planned by itself: gradients come as sums of which devices have parts, state rests as it would,
and the updates are wanted on all devices, as in stages 1 and 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardax import _jax
from shardax.annotations.annotate import bind_annotation
from shardax.graph.evaluate import evaluate
from shardax.options import Options
from shardax.sharding import NOTHING_OWED, Axes, Owing, from_spec
from shardax.transforms import Context
from shardax.zero.by_cost import Costs, Dealt
from shardax.zero.mixed import traced as traced_update
from shardax.zero.padded import padded_as, unpad
from shardax.zero.stacks import dealt_ways, state_stacks
from shardax.zero.within import planned

Update = Callable[..., Any]


def alike(update: Update, state: Any, params: Any) -> list[list[int]]:
    """The leaves of an optax state, by their numbers, in groups of those with which the update computes alike
    as matrices. None where the update cannot be traced.
    """
    grads, old = len(jax.tree.leaves(params)), jax.tree.leaves(state)
    try:
        program, new = traced_update(update, *jax.eval_shape(lambda *trees: trees, params, state, params))
    except Exception:  # the update is the user's, and may want any argument: `mixed_by` has warned
        return []
    if [x.shape for x in jax.tree.leaves(new)] != [x.shape for x in old]:
        return []
    first = len(program.out_avals) - len(old)
    groups = state_stacks(program, {grads + k: first + k for k in range(len(old))})
    return [[i - grads for i in group] for group in groups]


def seconds(
    update: Update, params: Any, state: Any, placed: Any, mesh: Mesh | AbstractMesh, axes: Axes
) -> float:
    """Those of an update alone, by its plan, with stacks or without, whichever is faster. `state` is as it
    rests, in the shardings `placed`.
    """
    pairs = zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True)
    dims = [from_spec(sharding.spec, x.ndim).dims for sharding, x in pairs]

    def run(grads, state, params):
        grads = _pending(grads, axes)
        rests = _each(state, dims, "argument")
        updates, new = update(grads, unpad(rests), params)
        updates = jax.tree.map(lambda u: _annotated(u, ((),) * u.ndim, "result"), updates)
        return updates, _each(padded_as(new, state), dims, "result")

    program, _ = traced_update(run, params, state, params)
    ways = _ways(program, len(program.in_avals), mesh, axes).values()
    return min(_seconds(way, mesh) for way in (program, *ways))


def dealt_out(run: Callable[..., Any], args: tuple[Any, ...], axes: Axes, dealt: Dealt | None) -> Any:
    """What a function makes of gradients and other arguments, in a program on the mesh in context: what it
    computes alike with matrices in stacks, as `dealt` says, or as that is fastest.
    """
    leaves, structure = jax.tree.flatten(args)
    mesh = _jax.context_mesh()
    if dealt is False or mesh is None or _jax.is_eager(leaves):
        return run(*args)

    def with_pending(*xs):
        grads, *others = structure.unflatten(xs)
        return run(_pending(grads, axes), *others)

    traced, out = jax.make_jaxpr(lambda *xs: run(*structure.unflatten(xs)), return_shape=True)(*leaves)
    jaxpr, consts = _jax.hoist_consts(traced)  # what the function closes over may be traced too
    ways = _ways(jaxpr, len(leaves), mesh, axes, dealt)
    how = next(iter(ways), False)
    if dealt is None and ways:
        alone = _jax.hoist_consts(jax.make_jaxpr(with_pending)(*leaves))[0]
        others = _ways(alone, len(leaves), mesh, axes)
        found = {False: _seconds(alone, mesh), **{k: _seconds(others[k], mesh) for k in ways if k in others}}
        how = min(found, key=found.__getitem__)
    if not how:
        return run(*args)
    return jax.tree.unflatten(jax.tree.structure(out), evaluate(ways[how], [*leaves, *consts]))


def _ways(
    program, leaves: int, mesh: Mesh | AbstractMesh, axes: Axes, dealt: Dealt | None = None
) -> dict[Dealt, Any]:
    """The program with stacks, dealt out as is said, or in each way. An island, as by cost, has axes of the
    type Auto.
    """
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        dealt = True
    return dealt_ways(program, range(leaves), Costs(mesh, axes, Options().priced_for), dealt)


def _seconds(program, mesh: Mesh | AbstractMesh) -> float:
    mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    return planned(None, program, Context(mesh, (), (), Options())).seconds


def _pending(grads: Any, axes: Axes) -> Any:
    return jax.tree.map(lambda g: _annotated(g, ((),) * g.ndim, "state", Owing(axes)), grads)


def _each(tree: Any, dims: Sequence[Any], role: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([_annotated(x, d, role) for x, d in zip(leaves, dims, strict=True)])


def _annotated(x: Any, dims: Any, role: Any, owing: Owing = NOTHING_OWED) -> Any:
    return bind_annotation(x, dims, "the optimizer's update", role, owing=owing)

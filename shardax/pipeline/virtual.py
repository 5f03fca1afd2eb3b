"""One microbatch's program of a step, made by partitioning the step over an axis of microbatches.

    split over the axis               of one microbatch
    a pending sum, settled            accumulated over microbatches
    the index along the axis          the number of the microbatch
    anything else that is sent        joins microbatches: no sum over the batch

So random bits, positions and masks that are made for the whole batch are exactly those of the step, and a
batch that the microbatches do not divide has its last ones padded, and masked.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from shardax import _jax, program
from shardax.annotations.annotate import Role, annotate_p, bind_annotation
from shardax.annotations.explicit import as_at, shape_of
from shardax.cost.chips import NOMINAL
from shardax.differentiated import is_differentiated, is_transposed
from shardax.graph import annotations
from shardax.graph.equations import map_equations
from shardax.graph.evaluate import bound, evaluate, is_call
from shardax.ledger.collectives import kind_of
from shardax.options import Options, Refused
from shardax.partition.decisions import Decisions
from shardax.pipeline.flipped import unflipped
from shardax.pipeline.repacking import PROGRAMS, types_of
from shardax.sharding import Axes, AxisSizes
from shardax.spmd_rules.equations import any_inside, is_once
from shardax.spmd_rules.registry import MOVES, register_rule
from shardax.spmd_rules.rule import KEEP, REDUCTIONS, Factors
from shardax.transforms import Context

AXIS = "microbatch"
STACKED = -1
JOINS = "all_gather", "all_reduce"  # kinds of collectives that give all microbatches the same

_CHIP = replace(NOMINAL, name="microbatches", flops=1e3, link_rate=1e6, start=1.0)
"""Sends are dear, so that none pays but sums that have to be; computing is dearer, so that it pays for none
of them to compute all rows in each microbatch, as of text of which inputs and labels are both made.
"""

noted_p = Primitive("noted")
"""noted x: the value x, with the parameters of an `annotate` over the axes of the step's own mesh."""

noted_p.def_abstract_eval(lambda x, **_: x)
register_rule(noted_p, "... -> ...", passes=(MOVES(0),), fuses="all")

kept_p = Primitive("kept")
kept_p.multiple_results = True
"""kept *xs: the results of the equation `repacked`, pack or unpack, of whole operands: it stays one."""

kept_p.def_abstract_eval(lambda *xs, repacked, **params: types_of(repacked, *xs, **params))


held_p = Primitive("held")
held_p.multiple_results = True
"""held *xs: the results of the equation `held`, a loop, a branch or a callback, of whole operands: none in it
is split."""


@held_p.def_abstract_eval
def _held_types(*_, held):
    """On the mesh in context."""
    return jax.make_jaxpr(lambda *xs: xs)(*(shape_of(v.aval) for v in held.outvars)).in_avals


def _whole(node) -> str:
    """No dim is split, and nothing may be pending."""
    names = map("d{}!".format, itertools.count())
    sides = [
        [" ".join(itertools.islice(names, len(v.shape))) for v in vs] for vs in (node.inputs, node.outputs)
    ]
    return " -> ".join(", ".join(side) for side in sides)


register_rule(held_p, _whole)
register_rule(kept_p, _whole)


@dataclass(frozen=True)
class Microbatch:
    """The program of one microbatch: `jaxpr` takes the step's arguments and last the microbatch's number,
    int32. `is_batch`: of each argument, whether it takes the rows of the microbatch alone. `results`: of each
    result, along which dim it has the microbatch's part alone; None: it is whole; STACKED: those of all
    microbatches are stacked. `is_all`: whether there is one microbatch alone, which owes no sums.
    `mixes_rows`: whether rows are computed with others of the microbatch, as pairs are.
    """

    jaxpr: Any
    is_batch: tuple[bool, ...]
    results: tuple[int | None, ...]
    is_all: bool = False
    mixes_rows: bool = False

    @property
    def is_in_order(self) -> bool:
        """Whether the microbatch has to be the part of the batch that its number says; else any rows do."""
        jaxpr = self.jaxpr.jaxpr
        is_numbered = any(v is jaxpr.invars[-1] for eqn in jaxpr.eqns for v in eqn.invars)
        is_moved = any(is_sent(eqn) and kind_of(eqn) not in JOINS for eqn in jaxpr.eqns)
        return self.mixes_rows or is_numbered or is_moved

    @property
    def batch_dim(self) -> int:
        """Along which the microbatches of an array of the batch lie, as it is cut: [microbatches, rows, ...],
        or where any rows do, [rows, microbatches, ...], which is a reshape and no copy."""
        return 0 if self.is_in_order else 1


def microbatch(jaxpr, context: Context, is_batch: Sequence[bool], count: int) -> Microbatch:
    """Partitions the global jaxpr of a step, whose arguments `is_batch` have rows of the batch."""
    state = {(a.type.shape, a.type.dtype) for a in context.arguments if a.is_state}
    rows = next(a.type.shape[0] for a, split in zip(context.arguments, is_batch, strict=True) if split)

    def has_rows(x) -> bool:
        return x.ndim > 0 and x.shape[0] == rows and (x.shape, x.dtype) not in state

    def run(*args):
        flat = map_equations(jaxpr, lambda eqns: [_noting(_jax.eqn_under_local_mesh(eqn)) for eqn in eqns])
        placed = [_along(x, split and rows % count == 0) for x, split in zip(args, is_batch, strict=True)]
        if rows % count:  # arguments come in whole
            placed = [_along(x, split, "inside") for x, split in zip(placed, is_batch, strict=True)]
        results = evaluate(flat, placed)
        return [_along(x, has_rows(x) and rows % count == 0) for x in results]

    types = list(map(shape_of, jaxpr.in_avals))
    mesh = AbstractMesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        made = _partitioned(_whole_after(unflipped(jax.make_jaxpr(run)(*types)), has_rows), mesh)
        (eqn,) = made.jaxpr.jaxpr.eqns
        consts = made.jaxpr.consts  # the operands before the arguments
        local = _numbered(_jax.closed(eqn.params["jaxpr"]), consts, made.refinement.sizes)
    splits = [
        [s.dims.index((AXIS,)) if (AXIS,) in s.dims else None for s in map(made.refinement.shown, side)]
        for side in (made.in_shardings, made.out_shardings)
    ]
    is_split = tuple(d is not None for d in splits[0])
    return Microbatch(local, is_split, tuple(splits[1]), count == 1, _mixes_rows(made.decisions, rows))


def _mixes_rows(decisions: Decisions, rows: int) -> bool:
    """Whether any operation needs the rows of the batch in their order: whether it splits anything but whole
    rows, which it keeps or reduces over, as a window, a stride or pairs of rows do."""
    return any(
        decision.factors is not None and _splits_rows(decision.factors, factor, rows)
        for _, decision in decisions.pairs()
        for factor, split in decision.splits.items()
        if split.axes
    ) or any(_mixes_rows(body, rows) for _, decision in decisions.pairs() for body in decision.bodies)


def _splits_rows(factors: Factors, factor: str, rows: int) -> bool:
    is_alike = factors.type_of(factor) in (KEEP, *REDUCTIONS) and "~" not in factor
    return not is_alike or factors.sizes[factor] % rows > 0


def _whole_after(closed, has_rows: Callable[[Any], bool]):
    """The program, in which all that is made of gradients, and not differentiated, is whole: the update, that
    is, clipping and the like. Scalars, which cost next to nothing to reduce, would be made of parts of it.
    What happens once, as a callback, gets whole operands: no microbatch does it for the others."""
    after: set[Any] = set()

    def run(*args):
        env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))
        for eqn in closed.jaxpr.eqns:
            scope = eqn.source_info.name_stack
            operands = [v.val if _jax.is_literal(v) else env[v] for v in eqn.invars]
            if is_transposed(scope) or any(not _jax.is_literal(v) and v in after for v in eqn.invars):
                after.update(eqn.outvars)
            is_after = not is_differentiated(scope) and not after.isdisjoint(eqn.outvars)
            is_held = is_once(eqn)
            if eqn.primitive.name in _LOOPS and not any(map(has_rows, operands)):
                is_held = is_after or any_inside(is_once, eqn)
            if is_held:
                with as_at(eqn):
                    made = held_p.bind(*operands, held=eqn)
            else:
                made = bound(eqn, operands)
            if is_after:
                made = [x if has_rows(x) else _along(x, False, "inside") for x in made]
            env.update(zip(eqn.outvars, made, strict=True))
        return [v.val if _jax.is_literal(v) else env[v] for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*map(shape_of, closed.in_avals))


def _partitioned(jaxpr, mesh: AbstractMesh):
    """All that is made of the batch is split, and nothing else; nothing is sent but sums, if there is such a
    way."""
    for chip, strict in ((_CHIP, True), ("slow", False)):
        options = Options(chip=chip, strict=strict, passes=("dead", "share"), idle_axes="near")
        try:
            return program.build(jaxpr, (None,) * len(jaxpr.in_avals), mesh, options)
        except Refused:
            if not strict:
                raise
    raise AssertionError


def _along(x, split: bool, role: Role = "argument"):
    dims = tuple((AXIS,) if split and d == 0 else () for d in range(x.ndim))
    return bind_annotation(x, dims, "the pipeline's microbatches", role)


def _noting(eqn):
    """An annotation inside of the step, as what passes its value on; of arguments and results, as nothing.
    What packs and unpacks, as what stays so."""
    if eqn.primitive in PROGRAMS:
        return eqn.replace(primitive=kept_p, params={**eqn.params, "repacked": eqn.primitive})
    if (annotation := annotations.of_equation(eqn)) is None:
        return eqn
    params = eqn.params if eqn.primitive is annotate_p else annotations.as_annotation(eqn)
    if not annotation.is_inside:
        params = {**params, "dims": (None,) * len(params["dims"]), "role": "implied", "like": None}
    return eqn.replace(primitive=noted_p, params=params)


def _numbered(local, consts: Sequence[Any], sizes: AxisSizes):
    """The local jaxpr with these as its first arguments, with the index along the axis as its last, and its
    annotations back. `sizes`: of the axis, or of its parts, where a reshape has cut it."""
    first = len(consts)
    assert [np.shape(x) for x in consts] == [x.shape for x in local.in_avals[:first]], "constants are whole"

    def restored(eqns):
        eqns = map(_released, map(_jax.eqn_under_local_mesh, eqns))
        return list(map(_restored, eqns))

    def _released(eqn):
        """Its bodies are restored here, since nothing looks into them."""
        if eqn.primitive is not held_p:
            return eqn
        held = eqn.params["held"]
        eqn = eqn.replace(primitive=held.primitive, params=held.params)
        return _jax.with_bodies(eqn, lambda body: map_equations(body, restored))

    def run(*args):
        whole = [*map(_without_mesh, consts), *args[:-1]]
        return _evaluated(map_equations(local, restored), whole, _places(args[-1], sizes))

    number = jax.ShapeDtypeStruct((), "int32")
    with _jax.axes_in_scope({**sizes, AXIS: math.prod(sizes.values())}):
        return _jax.dce(jax.make_jaxpr(run)(*map(shape_of, local.in_avals[first:]), number))


def _places(number, sizes: AxisSizes) -> dict[str, Any]:
    """Along each part of the axis, of which the first is the major one."""
    if len(sizes) == 1:
        return dict.fromkeys(sizes, number)
    return dict(zip(sizes, jnp.unravel_index(number, tuple(sizes.values())), strict=True))


def _restored(eqn):
    if eqn.primitive is kept_p:
        params = {name: x for name, x in eqn.params.items() if name != "repacked"}
        return eqn.replace(primitive=eqn.params["repacked"], params=params)
    return eqn.replace(primitive=annotate_p) if eqn.primitive is noted_p else eqn


def _evaluated(closed, args: Sequence[Any], places: Mapping[str, Any]) -> list[Any]:
    consts = map(_without_mesh, closed.consts)
    env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return _without_mesh(atom.val) if isinstance(atom, Literal) else env[atom]

    filled: dict[Any, Any] = {}  # with which number
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal):
            filled[eqn.outvars[0]] = eqn.invars[0].val
        with as_at(eqn):
            made = _step(eqn, list(map(read, eqn.invars)), places)
        if eqn.primitive.name == "select_n" and _are_one(filled, eqn.invars[1:]):
            made = [read(eqn.invars[1])]  # zeros, to which the first device adds a sum, and the others theirs
        env.update(zip(eqn.outvars, made, strict=True))
    return list(map(read, closed.jaxpr.outvars))


def _are_one(filled: Mapping[Any, Any], atoms: Sequence[Any]) -> bool:
    if any(isinstance(v, Literal) or v not in filled for v in atoms):
        return False
    return len({float(filled[v]) for v in atoms}) == 1


def _without_mesh(constant):
    """A constant, whose type JAX notes the mesh in which it was made on."""
    is_array = isinstance(constant, np.ndarray) or hasattr(constant, "__array__")
    return np.asarray(constant) if is_array and not isinstance(constant, jax.Array) else constant


def _step(eqn, operands: Sequence[Any], places: Mapping[str, Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [places[eqn.params["axis_name"]]]
    if eqn.primitive is annotate_p and not any(axes is not None for axes in eqn.params["dims"]):
        return operands
    if name in _LOOPS:  # whose bodies are of the mesh of microbatches
        return _LOOPS[name](
            eqn.params, operands, lambda body, args: _evaluated(_jax.closed(body), args, places)
        )
    if is_call(eqn):
        inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
        return _evaluated(_jax.closed(inner), operands, places)
    has_index = any(map(_has_index, jaxprs_in_params(eqn.params)))
    assert not has_index, f"{name} at {_jax.user_line(eqn.source_info)} reads the number of a microbatch"
    return bound(_over_all(eqn, tuple(places)), operands)


def _over_all(eqn, parts: Axes):
    """What joins all parts of the axis, as what joins all along it."""
    named = next((name for name in _AXES if name in eqn.params), None)
    if named is None or _axes_of(eqn) != parts:
        return eqn
    return eqn.replace(params={**eqn.params, named: (AXIS,)})


def _has_index(body) -> bool:
    return any(
        eqn.primitive.name == "axis_index" or any(map(_has_index, jaxprs_in_params(eqn.params)))
        for eqn in body.eqns
    )


Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def _scan(params, operands: Sequence[Any], evaluated: Evaluate) -> Sequence[Any]:
    consts, carries = _jax.scan_counts(params)
    fixed, start, rows = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

    def body(carry, x):
        made = evaluated(params["jaxpr"], [*fixed, *carry, *x])
        return made[:carries], made[carries:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, list(start), list(rows), **how)
    return [*carry, *stacked]


def _cond(params, operands: Sequence[Any], evaluated: Evaluate) -> Sequence[Any]:
    index, *given = operands
    branches = [lambda *args, body=body: evaluated(body, args) for body in params["branches"]]
    return lax.switch(index.astype("int32"), branches, *given)


def _while(params, operands: Sequence[Any], evaluated: Evaluate) -> Sequence[Any]:
    counts = params["cond_nconsts"], params["body_nconsts"]
    tests, fixed, start = operands[: counts[0]], operands[counts[0] : sum(counts)], operands[sum(counts) :]
    return lax.while_loop(
        lambda carry: evaluated(params["cond_jaxpr"], [*tests, *carry])[0],
        lambda carry: evaluated(params["body_jaxpr"], [*fixed, *carry]),
        list(start),
    )


_LOOPS = {"cond": _cond, "scan": _scan, "while": _while}


_AXES = ("axes", "axis_name")  # as collectives name the parameter


def _axes_of(eqn) -> Axes:
    axes = next((eqn.params[name] for name in _AXES if name in eqn.params), ())
    return axes if isinstance(axes, tuple) else (axes,)


def is_sent(eqn) -> bool:
    """Whether an equation joins what devices along the axis, microbatches that is, have."""
    return bool(kind_of(eqn)) and any(_is_of_axis(axis) for axis in _axes_of(eqn))


def joins_all(eqn) -> bool:
    """Whether it joins what all of them have, and not of parts of the axis."""
    return _axes_of(eqn) == (AXIS,)


def _is_of_axis(axis: Any) -> bool:
    return isinstance(axis, str) and axis.partition(".")[0] == AXIS

"""jax.experimental.custom_partitioning: completion reads its rule, and it runs on shards as its `partition`
callback says.

Each way to split the factors of the rule gives shardings to operands and results. The callback is called with
these, on the mesh that the user named. It answers with the shardings that it takes and makes, and a function
of shards, which may send over axes by their names. The answer is priced as any way to run a node is: by what
it takes to reshard operands and results, and what the function sends.

    rule ──▶ splits of factors ──▶ shardings
         ──partition──▶ lower_fn, operands' and results' shardings ──▶ the candidate

A function knows only the sizes of its shards. So an uneven dim stays unsplit where the function names an axis
that splits it, or where a place along the dim depends on other places than its own; elsewhere the function
sees zeros past the end. Where the callback requests shardings that this does not allow, even with everything
unsplit, the original function runs instead, on replicated operands.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import NamedSharding

from shardax import _jax
from shardax.cost.network import Message
from shardax.graph.graph import Node
from shardax.ledger.collectives import collectives
from shardax.meshes import sites
from shardax.sharding import Layout, Padding, Sharding, entry_axes, from_spec
from shardax.spmd_rules.claims import noting
from shardax.spmd_rules.localize import tensor_layout
from shardax.spmd_rules.registry import RULES, Local, mask_padding, register_rule, replicated_rule
from shardax.spmd_rules.rule import KEEP, Factors, Rule
from shardax.spmd_rules.shardy import as_rule

NAME = "custom_partitioning"

Sides = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]  # of operands, of results


@dataclass(frozen=True)
class _Answer:
    """What `partition` gave back, in the axes of the program's mesh."""

    lower: Callable[..., Any]
    sides: Sides


# The rule


def _rule(node: Node) -> str | Rule:
    """The sharding_rule; without one, the factors that infer_sharding_from_operands shows; else nothing is
    split.
    """
    memo = node.params["call"].memo
    if "rule" not in memo and "on" not in node.params:
        return replicated_rule(node)  # its mesh is not known yet
    if "rule" not in memo:
        memo["rule"] = _read_rule(node)
    return memo["rule"]


def _read_rule(node: Node) -> str | Rule:
    p = node.params
    mesh, _ = p["on"]
    avals = ([v.aval for v in values] for values in (node.inputs, node.outputs))
    with noting(lambda: f"the sharding_rule of {_what(node)}"):
        sdy_rule = _jax.sharding_rule(p, mesh, *avals)
    if sdy_rule is None:
        return replicated_rule(node) if p["infer_sharding_from_operands"] is None else _inferred(node)
    try:
        return as_rule(sdy_rule, node.in_shapes, node.out_shapes)
    except ValueError as error:
        raise ValueError(f"{_what(node)}: {error}") from None


def _inferred(node: Node) -> str:
    """Each dim of the operands is split alone, over one axis: it shares a factor with those of the results
    that then are split. Those of the results that none reaches are unsplit."""
    mesh, _ = node.params["on"]
    axis = next((a for a, n in mesh.shape.items() if n > 1), mesh.axis_names[0])
    factor_names: dict[tuple[int, int], str] = {}  # of the results' dims
    operands = []
    for i, shape in enumerate(node.in_shapes):
        dims: list[str] = []
        for d in range(len(shape)):
            reached = [at for at in _reached(node, i, d, axis) if node.out_shapes[at[0]][at[1]] == shape[d]]
            known = (
                factor_names[at] for at in reached if at in factor_names and factor_names[at] not in dims
            )
            dims.append(next(known, f"_{i}_{d}"))
            factor_names |= dict.fromkeys((at for at in reached if at not in factor_names), dims[-1])
        operands.append(" ".join(dims))
    results = (
        " ".join(factor_names.get((r, e), f"w{r}_{e}!") for e in range(len(s)))
        for r, s in enumerate(node.out_shapes)
    )
    return f"{', '.join(operands)} -> {', '.join(results)}"


def _reached(node: Node, i: int, d: int, axis: str) -> list[tuple[int, int]]:
    """(result, dim) of each dim that is split where dim d of operand i alone is, no result twice."""
    p = node.params
    mesh, _ = p["on"]
    split = [
        [(axis,) if (i, d) == (j, e) else () for e in range(len(s))] for j, s in enumerate(node.in_shapes)
    ]
    shapes = _shapes(node.inputs, p["in_tree"], [Sharding(tuple(dims)) for dims in split], mesh)
    results = p["out_tree"].unflatten([jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in node.outputs])
    with noting(lambda: f"the infer_sharding_from_operands callback of {_what(node)}, asked for {split}"):
        inferred = p["infer_sharding_from_operands"](*p["static_args"], mesh, shapes, results)
    shardings = _read_shardings(
        node, p["out_tree"], inferred, node.out_shapes, "infer_sharding_from_operands", mesh
    )
    return [(r, s.dims.index((axis,))) for r, s in enumerate(shardings) if (axis,) in s.dims]


# The callback


def _requested(local: Local) -> Sides:
    """The shardings that the splits of factors give to operands and results."""
    factors = RULES[NAME].factors(local.node)
    operands, results = (
        tuple(tensor_layout(dims, factors, local.splits).sharding for dims in side)
        for side in (factors.operands, factors.results)
    )
    return operands, results


def _answer(local: Local) -> _Answer | None:
    """What `partition` answers; None where it is not called: on one device, as JAX does, and where a part of
    an axis has no name in the user's mesh."""
    requested, memo = _requested(local), local.params["call"].memo
    if requested not in memo:
        memo[requested] = _call_partition(local, requested) if math.prod(local.sizes.values()) > 1 else None
    return memo[requested]


def _taken(local: Local) -> _Answer | None:
    """The answer by which operands and results have their layouts; None where the function itself runs, on
    replicated operands.
    """
    answer = _answer(local)
    shardings = tuple(tuple(layout.sharding for layout in side) for side in (local.operands, local.results))
    return answer if answer is not None and answer.sides == shardings else None


def _call_partition(local: Local, requested: Sides) -> _Answer | None:
    node, p = local.node, local.params
    mesh, refined = p["on"]
    operands, results = ([refined.spelled(s) for s in side] for side in requested)
    if None in operands or None in results:
        return None
    shapes = (
        _shapes(node.inputs, p["in_tree"], operands, mesh),
        _shapes(node.outputs, p["out_tree"], results, mesh),
    )
    with noting(lambda: f"the partition callback of {_what(node)}, asked for {operands} -> {results}"):
        named, lower, made, taken = p["partition"](*p["static_args"], mesh, *shapes)
    if dict(named.shape) != dict(mesh.shape):
        raise ValueError(
            f"{_what(node)}: partition gave back a mesh with axes {dict(named.shape)}, the program's has "
            f"{dict(mesh.shape)}: give back the one that it is called with"
        )
    sides = ((p["in_tree"], taken, node.in_shapes), (p["out_tree"], made, node.out_shapes))
    shardings = [_read_shardings(node, *side, "partition", mesh) for side in sides]
    on_program = (
        tuple(Sharding(refined.refined(s.dims, refined.program)) for s in side) for side in shardings
    )
    return _Answer(lower, tuple(on_program))  # type: ignore[arg-type]


def _shapes(values, tree, shardings, mesh):
    leaves = [
        jax.ShapeDtypeStruct(v.shape, v.aval.dtype, sharding=NamedSharding(mesh, s.spec))
        for v, s in zip(values, shardings, strict=True)
    ]
    return tree.unflatten(leaves)


def _read_shardings(node: Node, tree, returned, shapes, callback: str, mesh) -> list[Sharding]:
    """The leaves of what a callback gave back."""
    leaves = tree.flatten_up_to(returned)
    for leaf in leaves:
        if not isinstance(leaf, NamedSharding) or dict(leaf.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"{_what(node)}: {callback} gave back {leaf}: give a NamedSharding on the mesh of "
                f"{dict(mesh.shape)}"
            )
    return [from_spec(leaf.spec, len(shape)) for leaf, shape in zip(leaves, shapes, strict=True)]


def _what(node: Node) -> str:
    return f"custom_partitioning at {node.line or 'an unknown line'}"


# The ways to run it


def _ways(candidates: Iterator[Local], padding: Padding) -> Iterator[Local]:
    """The candidates that the callback takes, each with the layouts that it requests for operands and
    results.

    To refuse the first, which splits as much as can be, is an error, as under JAX's own partitioner; to
    refuse others only where there is none that it takes. Where its function takes no shards of uneven dims,
    and so nothing can be split, a warning says so.
    """
    refused, misfit, taken, split = None, None, 0, False
    for i, local in enumerate(candidates):
        try:
            placed = _placed(local, padding)
        except _DoesNotFit as error:
            misfit, placed = misfit or error, None
        except Exception as error:
            if not i:
                raise
            refused, placed = refused or error, None
        if placed is not None:
            taken += 1
            split = split or bool(placed.splits)
            yield placed
    if not taken and refused:
        raise refused
    if misfit and not split:
        warnings.warn(f"{misfit}. It runs unsplit", stacklevel=2)


class _DoesNotFit(Exception):
    """The callback's function does not take shards as long as the blocks of an uneven dim are."""


def _placed(local: Local, padding: Padding) -> Local | None:
    """The candidate with the shardings of its answer; None where that cannot run. With nothing split
    there is always a way.
    """
    answer = _answer(local)
    if answer is not None and all(
        sum(f in local.splits for f in group) in (0, len(group))  # a group has to be split together
        for group in RULES[NAME].factors(local.node).window_groups
    ):
        operands, results = (
            tuple(
                _layout(s, have, v.shape, padding) for s, have, v in zip(side, layouts, values, strict=True)
            )
            for side, layouts, values in zip(
                answer.sides,
                (local.operands, local.results),
                (local.node.inputs, local.node.outputs),
                strict=True,
            )
        )
        placed = replace(local, operands=operands, results=results)
        if _runs(placed, answer):
            return placed
    return None if local.splits else local


def _layout(sharding: Sharding, have: Layout, shape, padding: Padding) -> Layout:
    padded = (
        held if axes == before else padding.padded(n, axes)
        for axes, before, held, n in zip(sharding.dims, have.dims, have.padded, shape, strict=True)
    )
    return Layout(sharding, tuple(padded))


def _runs(local: Local, answer: _Answer) -> bool:
    uneven = list(_uneven(local))
    try:
        program = _program(local, answer)
        _check_types(local, program)
    except (TypeError, ValueError) as error:
        if not uneven:
            raise
        what = f"{_what(local.node)}: its lower_fn does not take shards of uneven dims"
        raise _DoesNotFit(f"{what}: {type(error).__name__}: {error}") from error
    named = {
        a
        for eqn in _eqns(program.jaxpr)
        for entry in sites.named_axes(eqn.params).values()
        for a in entry_axes(entry)
    }
    factors = RULES[NAME].factors(local.node)
    return all(named.isdisjoint(axes) and _is_local(factor, axes, factors, local) for factor, axes in uneven)


def _uneven(local: Local) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(factors, axes) of each dim that is split unevenly."""
    factors, layouts = RULES[NAME].factors(local.node), (*local.operands, *local.results)
    for dims, layout, shape in zip(
        factors.tensors, layouts, (*local.node.in_shapes, *local.node.out_shapes), strict=True
    ):
        for dim, axes, padded, n in zip(dims, layout.dims, layout.padded, shape, strict=True):
            if padded != n:
                yield dim, axes


def _is_local(dim: Sequence[str], axes: Sequence[str], factors: Factors, local: Local) -> bool:
    """Whether by the rule each place along a dim depends on the same place alone: its one factor is kept, has
    one size, is in all results, and is split so wherever it is."""
    if len(dim) != 1 or factors.type_of(dim[0]) != KEEP or "~" in dim[0]:
        return False
    if not all(dim in tensor for tensor in factors.results):
        return False
    tensors = zip(factors.tensors, (*local.operands, *local.results), strict=True)
    split = [layout.dims[d] for dims, layout in tensors for d, at in enumerate(dims) if dim[0] in at]
    return all(have == axes for have in split)


# On shards


def _local(local: Local, *shards):
    answer = _taken(local)
    if answer is None:
        return jaxpr_as_fun(_jax.under_local_mesh(local.params["call"].jaxpr))(*shards)
    shards = [
        shard
        if jax.numpy.issubdtype(shard.dtype, jax.dtypes.extended)
        else mask_padding(shard, local.operands[i], local.node.in_shapes[i], 0, local.sizes)
        for i, shard in enumerate(shards)
    ]
    return jaxpr_as_fun(_jax.under_local_mesh(_program(local, answer)))(*shards)


def _program(local: Local, answer: _Answer) -> Any:
    """The callback's function on shards of this candidate, as a jaxpr in the axes of the program's mesh."""
    memo = local.params["call"].memo
    key = (_requested(local), tuple(map(local.in_shape, range(len(local.operands)))))
    if key not in memo:
        memo[key] = _trace(local, answer)
    return memo[key]


def _trace(local: Local, answer: _Answer):
    mesh, refined = local.params["on"]
    shards = [jax.ShapeDtypeStruct(local.in_shape(i), v.aval.dtype) for i, v in enumerate(local.node.inputs)]
    args = local.params["in_tree"].unflatten(shards)
    of_shapes = f"on shards of shapes {[x.shape for x in shards]}"
    with noting(lambda: f"the lower_fn of {_what(local.node)}, {of_shapes}"):
        with _jax.lines_of_their_own(), local.node.eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(answer.lower, axis_env=list(mesh.shape.items()))(*args)
    return sites.in_refined_axes(jaxpr, refined)


def _check_types(local: Local, program) -> None:
    got = [f"{x.dtype}{list(x.shape)}" for x in program.out_avals]
    meant = [f"{v.aval.dtype}{list(local.out_shape(i))}" for i, v in enumerate(local.node.outputs)]
    if got != meant:
        shards = ", ".join(str(local.in_shape(i)) for i in range(len(local.operands)))
        raise ValueError(
            f"{_what(local.node)}: lower_fn makes {', '.join(got)} of shards of shapes {shards}, the "
            f"shardings that partition gave back promise {', '.join(meant)}"
        )


def _eqns(jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        yield from itertools.chain.from_iterable(_eqns(body) for body in jaxprs_in_params(eqn.params))


def _sends(local: Local) -> list[Message]:
    """What the callback's function sends, in each of its collectives."""
    answer = _taken(local)
    sent = collectives(_program(local, answer), local.sizes) if answer else ()
    return [c.message._replace(nbytes=c.total) for c in sent if not c.other_branch]


register_rule(NAME, _rule, _local, sends=_sends, ways=_ways, as_suggested=True)

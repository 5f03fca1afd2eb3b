"""Makes the graph of a jaxpr: calls inlined, loops with bodies.

A jaxpr may be called from several places and then shares its variables between them. Here each call site has
values of its own, so that each may be sharded in its own way. What is inlined: `jit`, custom derivative
calls, `remat2` (behind its optimization barrier), and every other call that only carries a jaxpr. `scan`,
`while` and `cond` keep their bodies, as graphs. So does `shard_map`, whose body sees shards: its operands and
results are annotated with its specs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import SAVED, annotate_p
from shardax.annotations.explicit import memory_of, shape_of
from shardax.graph import searches, static_updates
from shardax.graph.graph import Graph, Node, Value
from shardax.sharding import from_spec


def from_jaxpr(jaxpr, callers: tuple[Any, ...] = ()) -> Graph:
    """The graph of a ClosedJaxpr; its constants become literals. `callers` are the equations that it is a
    body of.
    """
    jaxpr = _jax.closed(jaxpr)
    graph = Graph([Value(v.aval) for v in jaxpr.jaxpr.invars])
    graph.outputs = _Inliner(graph.nodes, _jax.EMPTY_NAME_STACK, callers).run(jaxpr, graph.inputs)
    return graph


def made_of(
    function: Callable[..., Any], inputs: Sequence[Value], node: Node
) -> tuple[list[Node], list[Value]]:
    """The nodes of a function of values, and what it gives, in the place of a node: with its scope and
    line.
    """
    types = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in inputs]
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), ())
    ):  # on another, JAX would note the shardings of values
        jaxpr = jax.make_jaxpr(function)(*types)
    return inlined(jaxpr, inputs, node)


def inlined(jaxpr, inputs: Sequence[Value], node: Node) -> tuple[list[Node], list[Value]]:
    """The same of a closed jaxpr."""
    inliner = _Inliner([], node.scope, node.callers)
    outputs = inliner.run(_jax.on_line_of(node.eqn, jaxpr), inputs)
    return inliner.nodes, outputs


@dataclass(eq=False, slots=True)
class _Inliner:
    """Appends the equations of jaxprs to `nodes`, all under the name stack `scope`. `made` remembers values,
    so that they are not made again.
    """

    nodes: list[Node]
    scope: Any
    callers: tuple[Any, ...] = ()
    made: dict[Any, Value] = field(default_factory=dict)

    def run(self, closed, inputs: Sequence[Value]) -> list[Value]:
        """Appends the nodes of `closed` and returns the values of its results."""
        env: dict[Any, Value] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = Value(var.aval, const, True)

        def read(atom) -> Value:
            return Value(atom.aval, atom.val, True) if _jax.is_literal(atom) else env[atom]

        for eqn in closed.jaxpr.eqns:
            outputs = _CALLS.get(eqn.primitive.name, _plain)(self, eqn, list(map(read, eqn.invars)))
            for var, value in zip(eqn.outvars, outputs, strict=True):
                env[var] = value
        return list(map(read, closed.jaxpr.outvars))

    def call(self, eqn, jaxpr, inputs: Sequence[Value]) -> list[Value]:
        return _Inliner(self.nodes, self.scope_of(eqn), (eqn, *self.callers), self.made).run(
            _jax.closed(jaxpr), inputs
        )

    def scope_of(self, eqn):
        return self.scope + eqn.source_info.name_stack

    def append(
        self,
        eqn,
        primitive,
        params,
        inputs: list[Value],
        outputs: list[Value],
        bodies: tuple[Graph, ...] = (),
    ) -> list[Value]:
        self.nodes.append(
            Node(primitive, params, inputs, outputs, eqn, self.scope_of(eqn), self.callers, bodies)
        )
        return outputs


def _plain(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    bodies = _BODIES.get(eqn.primitive.name, lambda params: ())(eqn.params)
    graphs = tuple(from_jaxpr(body, (eqn, *inliner.callers)) for body in bodies)
    return inliner.append(
        eqn, eqn.primitive, eqn.params, inputs, [Value(v.aval) for v in eqn.outvars], graphs
    )


def _call(get_jaxpr: Callable[[Any], Any]):
    return lambda inliner, eqn, inputs: inliner.call(eqn, get_jaxpr(eqn), inputs)


def _jit(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """A jit inside: it is inlined, and its shardings, where it has any, become annotations."""
    if params := searches.search_params(eqn):
        return inliner.append(eqn, searches.search_p, params, inputs, [Value(v.aval) for v in eqn.outvars])
    inputs = _constrained(inliner, eqn, inputs, eqn.params["in_shardings"])
    return _constrained(
        inliner, eqn, inliner.call(eqn, eqn.params["jaxpr"], inputs), eqn.params["out_shardings"]
    )


def _constrained(inliner: _Inliner, eqn, values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
    def constrain(value: Value, sharding) -> Value:
        if not isinstance(sharding, NamedSharding):
            return value
        return inliner.append(
            eqn, _jax.sharding_constraint_p, {"sharding": sharding}, [value], [Value(value.aval)]
        )[0]

    return [constrain(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _device_put(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """A place with a spec becomes an annotation. What is left moves to another memory, of each device its
    shard.
    """
    values = _constrained(inliner, eqn, inputs, eqn.params["devices"])
    results = []
    for i, (value, var) in enumerate(zip(values, eqn.outvars, strict=True)):
        memory = memory_of(var.aval)
        if memory_of(value.aval) is not memory:
            semantics = eqn.params["copy_semantics"][i : i + 1]
            params = {"devices": (memory,), "srcs": (None,), "copy_semantics": semantics}
            (value,) = inliner.append(eqn, eqn.primitive, params, [value], [Value(var.aval)])
        results.append(value)
    return results


def _remat(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """remat2: inlined behind an optimization barrier when it recomputes, or XLA shares the work with the
    forward pass.
    """
    if eqn.params["differentiated"] and eqn.params["prevent_cse"] is not False:
        inputs = inliner.append(eqn, lax.optimization_barrier_p, {}, inputs, [Value(v.aval) for v in inputs])
    return inliner.call(eqn, eqn.params["jaxpr"], inputs)


def _linear_solve(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """custom_linear_solve: only its `solve` is run; its other programs are there for differentiation."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return inliner.call(
        eqn, eqn.params["jaxprs"].solve, inputs[first : first + lengths.solve] + inputs[sum(lengths) :]
    )


def _island(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """shard_map: its operands and results are annotated with its specs, and its body is a graph over
    shards.
    """
    around = (e.params["newly_manual_axes"] for e in inliner.callers if e.primitive.name == "shard_map")
    manual = eqn.params["newly_manual_axes"].union(*around)
    if manual.issuperset(a for a, size in eqn.params["mesh"].shape.items() if size > 1):
        inputs = _as_specified(inliner, eqn, inputs, "in_specs", rest=())
        return _as_specified(inliner, eqn, _plain(inliner, eqn, inputs), "out_specs", rest=())
    return _partly_manual(inliner, eqn, inputs)


def _as_specified(inliner: _Inliner, eqn, values: list[Value], side: str, rest) -> list[Value]:
    """The values annotated with the specs of one side of a shard_map; `rest`: what is requested of dims
    past those that a spec names, () for replicated, None for nothing."""
    annotated = []
    for i, (value, spec) in enumerate(zip(values, eqn.params[side], strict=True)):
        named = from_spec(spec, len(spec))
        dims = named.dims + (rest,) * (len(value.shape) - len(spec))
        role = "implied" if rest == () else "stack"
        fields = {"dims": dims, "source": f"shard_map {side}[{i}]", "role": role}
        params = {**fields, "like": None, "mesh": eqn.params["mesh"], "owing": named.owing}
        annotated += inliner.append(eqn, annotate_p, params, [value], [Value(value.aval)])
    return annotated


def _partly_manual(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """A shard_map over some axes: every other axis may split what is inside, as it may what is outside.

    The manual axes get dims of their own, which stand first: what is split so becomes a stack, of which the
    body sees one element.

        P("stage") of 12 rows over four stages:   [12, b]  ->  [4, 3, b]   the body: [3, b]
    """
    sizes = eqn.params["mesh"].shape
    lifted = {side: tuple(map(_manual_dims, eqn.params[side])) for side in ("in_specs", "out_specs")}
    specs = {side: tuple(PartitionSpec(*dims.values()) for dims in all_) for side, all_ in lifted.items()}
    inner = eqn.replace(params={**eqn.params, **specs, "partly_manual": True})
    stacks = [
        inliner.call(eqn, _traced(partial(_stacked, dims, sizes), v.aval), [v])[0] if dims else v
        for v, dims in zip(inputs, lifted["in_specs"], strict=True)
    ]
    stacks = _as_specified(inliner, inner, stacks, "in_specs", rest=None)
    body = from_jaxpr(eqn.params["jaxpr"], (eqn, *inliner.callers))
    counts = [
        tuple(math.prod(sizes[a] for a in axes) for axes in dims.values()) for dims in lifted["out_specs"]
    ]
    made = [
        Value(ShapedArray((*n, *v.shape), v.aval.dtype)) for n, v in zip(counts, body.outputs, strict=True)
    ]
    made = inliner.append(inner, eqn.primitive, inner.params, stacks, made, (body,))
    return [
        inliner.call(eqn, _traced(partial(_unstacked, dims), v.aval), [v])[0] if dims else v
        for v, dims in zip(
            _as_specified(inliner, inner, made, "out_specs", rest=None), lifted["out_specs"], strict=True
        )
    ]


def _manual_dims(spec) -> dict[int, Any]:
    """The dims that a spec splits, with the axes that it splits them over."""
    return {d: axes for d, axes in enumerate(from_spec(spec, len(spec)).dims) if axes}


def _stacked(dims: dict[int, Any], sizes: Mapping[str, int], x):
    """Each dim that is split has the number of its shards as a dim of its own, before all others."""
    shape: list[int] = []
    for d, n in enumerate(x.shape):
        count = math.prod(sizes[a] for a in dims.get(d, ()))
        shape += [count, n // count] if d in dims else [n]
    first = [d + i for i, d in enumerate(dims)]
    return lax.transpose(lax.reshape(x, shape), first + [d for d in range(len(shape)) if d not in first])


def _unstacked(dims: dict[int, Any], x):
    order, shape = [], []
    for d in range(x.ndim - len(dims)):
        before = [list(dims).index(d)] if d in dims else []
        order += [*before, len(dims) + d]
        shape.append(math.prod(x.shape[i] for i in (*before, len(dims) + d)))
    return lax.reshape(lax.transpose(x, order), shape)


def _traced(function: Callable[..., Any], aval):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(function)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


@dataclass(frozen=True)
class Own:
    """Something that belongs to one node alone, a jaxpr and what was learned of it. It does not count where
    nodes are compared.
    """

    jaxpr: Any = field(compare=False)
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)


def _custom_partitioning(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """It is inlined where it has no callback and, as JAX does, where its operands are shards already."""
    if eqn.params["partition"] is None or any(call.primitive.name == "shard_map" for call in inliner.callers):
        return inliner.call(eqn, eqn.params["call"], inputs)
    params = {**eqn.params, "call": Own(eqn.params["call"])}
    return inliner.append(eqn, eqn.primitive, params, inputs, [Value(v.aval) for v in eqn.outvars])


def _platform_index(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """Which branch a platform takes. Mosaic is where a Pallas kernel runs: no program for a mesh."""
    branches = [i for i, some in enumerate(eqn.params["platforms"]) if some is None or {*some} != {"mosaic"}]
    known = len(branches) == 1
    return [Value(eqn.outvars[0].aval, np.int32(*branches), True)] if known else _plain(inliner, eqn, inputs)


def _cond(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """The branch that is taken, where that is known."""
    index, *operands = inputs
    if not index.is_literal:
        return _plain(inliner, eqn, inputs)
    branches = eqn.params["branches"]
    return inliner.call(eqn, branches[min(max(int(index.literal), 0), len(branches) - 1)], operands)


def _while(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """A loop whose predicate has dims, as vmap makes them, becomes a loop whose predicate is a scalar."""
    if not eqn.params["cond_jaxpr"].out_avals[0].shape:
        return _plain(inliner, eqn, inputs)
    types = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in inputs]
    return inliner.call(eqn, jax.make_jaxpr(partial(_while_any, eqn.params))(*types), inputs)


def _while_any(params: dict[str, Any], *args):
    """The loop goes on while any of its predicates holds; carries whose own predicate does not hold stay as
    they are.
    """
    cond, body = (jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def on(carry):
        return cond(*args[:first], *carry)[0]

    def step(carry):
        going, new = on(carry), body(*args[first:last], *carry)
        where = (lax.broadcast_in_dim(going, x.shape, range(going.ndim)) for x in carry)
        return list(map(lax.select, where, new, carry))

    return lax.while_loop(lambda carry: on(carry).any(), step, list(args[last:]))


def _concatenate(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """Drops operands that are empty along the dim, as a roll by zero places has one. If one operand is left,
    it is the result.
    """
    full = [v for v in inputs if v.shape[eqn.params["dimension"]]] or inputs[:1]
    if len(full) == 1:
        return full
    return inliner.append(eqn, eqn.primitive, eqn.params, full, [Value(v.aval) for v in eqn.outvars])


def _over_dims(reduce: Callable[..., Any]):
    """A collective over dims, as vmap makes it of an axis_name, is a reduction; then comes what is over axes
    of a shard_map.
    """

    def call(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
        dims, axes = ([a for a in eqn.params["axes"] if isinstance(a, int) is over] for over in (True, False))
        if not dims:
            return _plain(inliner, eqn, inputs)
        reduced = jax.make_jaxpr(lambda *xs: [reduce(x, dims) for x in xs])(
            *(shape_of(v.aval) for v in inputs)
        )
        values = inliner.call(eqn, reduced, inputs)
        if not axes:
            return values
        params = {**eqn.params, "axes": tuple(axes)}
        return inliner.append(eqn, eqn.primitive, params, values, [Value(v.aval) for v in eqn.outvars])

    return call


def _folded(evaluate: Callable[..., Any], otherwise=_plain):
    """An equation that makes a few integers of literals, as indices are made, becomes a literal too."""

    def call(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
        aval = eqn.outvars[0].aval
        few = len(aval.shape) == 1 and aval.shape[0] <= _FEW and jax.numpy.issubdtype(aval.dtype, np.integer)
        if not few or not all(v.is_literal for v in inputs):
            return otherwise(inliner, eqn, inputs)
        return [Value(aval, np.asarray(evaluate(eqn.params, *(v.literal for v in inputs)), aval.dtype), True)]

    return call


def _update(starts_of: Callable[[Any, Sequence[Any]], Sequence[int] | None], first: int, last: int | None):
    """An update at a place that is known, from operands `first` to `last`, becomes padding and adding."""

    def call(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
        place = inputs[first:last]
        starts = (
            starts_of(eqn, [np.asarray(v.literal) for v in place])
            if all(v.is_literal for v in place)
            else None
        )
        jaxpr = static_updates.as_padding(eqn, starts) if starts is not None else None
        return _plain(inliner, eqn, inputs) if jaxpr is None else inliner.call(eqn, jaxpr, inputs)

    return call


def _scatter_starts(eqn, place):
    return static_updates.scatter_starts(eqn, *place)


def _param(name: str):
    return _call(lambda eqn: eqn.params[name])


def _annotation(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """An annotation that was made already is not made again. Annotations of residuals, which stand between a
    forward and a backward program, say nothing where both are part of one program.
    """
    params = eqn.params
    if inliner.callers and params["source"] == SAVED:
        return inputs
    key = (inputs[0], params["dims"], params["mesh"], params["like"], params["owing"])
    if key not in inliner.made:
        (inliner.made[key],) = _plain(inliner, eqn, inputs)
    return [inliner.made[key]]


def _pad(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """Remembers what a value was before it was padded at its ends."""
    (result,) = _plain(inliner, eqn, inputs)
    if all(low == within == 0 <= high for low, high, within in eqn.params["padding_config"]):
        inliner.made[result, inputs[0].shape] = inputs[0]
    return [result]


def _slice(inliner: _Inliner, eqn, inputs: list[Value]) -> list[Value]:
    """A crop of what was padded is the value before it was padded."""
    crops_ends = not any(eqn.params["start_indices"]) and eqn.params["strides"] is None
    unpadded = inliner.made.get((inputs[0], eqn.params["limit_indices"])) if crops_ends else None
    return _plain(inliner, eqn, inputs) if unpadded is None else [unpadded]


_FEW = 16
_CALLS = {
    "annotate": _annotation,
    "broadcast_in_dim": _folded(lambda params, x, *_: np.broadcast_to(x, params["shape"])),
    "call": _param("call_jaxpr"),
    "call_hi_primitive": _call(_jax.expand_hi_primitive),
    "checkpoint": _remat,
    "closed_call": _param("call_jaxpr"),
    "composite": _call(
        lambda eqn: eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    ),
    "concatenate": _folded(lambda params, *parts: np.concatenate(parts), _concatenate),
    "cond": _cond,
    "core_call": _param("call_jaxpr"),
    "custom_jvp_call": _param("call_jaxpr"),
    "custom_linear_solve": _linear_solve,
    "custom_partitioning": _custom_partitioning,
    "custom_vjp_call": _param("call_jaxpr"),
    "custom_vjp_call_jaxpr": _param("fun_jaxpr"),
    "custom_vmap_call": _param("call"),
    "device_put": _device_put,
    "dynamic_update_slice": _update(lambda eqn, place: [int(x) for x in place], 2, None),
    "eval_jaxpr": _param("call_jaxpr"),
    "jit": _jit,
    "linear_call": _call(lambda eqn: eqn.params["callee"]),
    "pad": _pad,
    "pjit": _jit,
    "pmax": _over_dims(lax.reduce_max),
    "pmin": _over_dims(lax.reduce_min),
    "platform_index": _platform_index,
    "psum": _over_dims(lax.reduce_sum),
    "psum_invariant": _over_dims(lax.reduce_sum),
    "remat2": _remat,
    "scatter": _update(_scatter_starts, 1, 2),
    "scatter-add": _update(_scatter_starts, 1, 2),
    "remat_opt": _param("fwd_jaxpr"),
    "shard_jit": _param("jaxpr"),
    "shard_map": _island,
    "slice": _slice,
    "while": _while,
    "xla_metadata_call": _param("jaxpr"),
}

_BODIES: dict[str, Callable[[dict[str, Any]], Sequence[Any]]] = {
    "cond": lambda params: params["branches"],
    "scan": lambda params: (params["jaxpr"],),
    "shard_map": lambda params: (params["jaxpr"],),
    "while": lambda params: (params["cond_jaxpr"], params["body_jaxpr"]),
}

INLINED, BODIES = (
    frozenset(_CALLS),
    frozenset(_BODIES),
)  # the names of those whose jaxprs are inlined, and kept as graphs

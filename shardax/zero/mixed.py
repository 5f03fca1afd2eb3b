"""Mixed: the dims of optimizer state along which an update needs whole arrays, as those of matrices are.

    state            an update of it                     mixed dims
    f32[m, n]        elementwise, or with its norm       none
    f32[m, n]        products of it with its transpose   both
    f32[l, m, n]     the same of each of l matrices      the last two

State that is split along another dim stays where it is; along one of these it moves there and back.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax

from shardax import _jax
from shardax.completion.edges import Edge, edges_of
from shardax.differentiated import is_differentiated
from shardax.graph import inline
from shardax.graph.graph import Graph, Node, Value
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import UNSPLIT, TensorFactors

Dim = tuple[int, int]  # of an argument, by its number
Bits = dict[tuple[Value, int], int]  # by dim of a value, those of arguments that are one with it
Side = Iterable[tuple[Value, TensorFactors]]
OfShapes = Mapping[tuple[int, ...], frozenset[int]]


def mixed_dims(graph: Graph, succeeded: Mapping[int, int]) -> Mapping[int, frozenset[int]]:
    """Of arguments, with the results that succeed them, the dims that are taken whole, or summed over in a
    product, somewhere behind the argument, or before the result and behind all that is differentiated.
    """
    starts = [(i, dim) for i in succeeded for dim in range(len(graph.inputs[i].shape))]
    behind = _behind(graph, {graph.inputs[i] for i in succeeded})
    before = _before(graph, {graph.outputs[r] for r in succeeded.values()})
    forward = {(graph.inputs[i], dim): 1 << k for k, (i, dim) in enumerate(starts)}
    backward: Bits = {}
    for k, (i, dim) in enumerate(starts):
        end = graph.outputs[succeeded[i]], dim
        backward[end] = backward.get(end, 0) | 1 << k
    mixed = _mixed(behind, forward, _operands, _results) | _mixed(before, backward, _results, _operands)
    found = [start for k, start in enumerate(starts) if mixed >> k & 1]
    return {i: frozenset(dim for number, dim in found if number == i) for i in succeeded}


def mixed_by(update: Callable[..., Any], state: Any, grads: Any, params: Any = None) -> OfShapes:
    """The same of the shapes in an optax state, by its update alone. A stack that has a parameter's shape has
    none: a loop may go over its layers, and then it rests along another dim.

    Where the update cannot be traced with these three, a warning says so, and nothing is known.
    """
    types = jax.eval_shape(lambda *trees: trees, grads, state, params)
    try:
        program, new = traced(update, *types)
    except Exception as error:  # the update is the user's, and may want any argument
        warnings.warn(
            f"which dims of the optimizer's state its update needs whole is not known ({error}), so each "
            "array rests along its largest: give an optimizer whose update takes gradients, state and "
            "parameters, as optax.GradientTransformation(tx.init, partial(tx.update, value=0.0)) does",
            stacklevel=4,
        )
        return {}
    graph = inline.from_jaxpr(_jax.dce(program))
    ends = len(jax.tree.leaves(grads)), len(graph.outputs) - len(jax.tree.leaves(new))
    pairs = enumerate(zip(jax.tree.leaves(types[1]), jax.tree.leaves(new), strict=True))
    succeeded = {ends[0] + k: ends[1] + k for k, (old, its) in pairs if old.shape == its.shape}
    found: dict[tuple[int, ...], frozenset[int]] = {}
    for i, dims in mixed_dims(graph, succeeded).items():
        shape = graph.inputs[i].shape
        found[shape] = found.get(shape, frozenset()) | dims
    layers = {x.shape for x in jax.tree.leaves(types[0]) if len(x.shape) > 2}
    return {shape: dims for shape, dims in found.items() if dims and shape not in layers}


def traced(update: Callable[..., Any], *types: Any) -> tuple[Any, Any]:
    """The jaxpr, and the types of the new state. What JAX refuses or warns of by the user's settings it does
    where the step is traced.
    """
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        program, (_, new) = jax.make_jaxpr(update, return_shape=True)(*types)
    return program, new


def _behind(graph: Graph, values: set[Value]) -> list[Edge]:
    """The edges of what depends on these values."""
    found: list[Node] = []
    for node in graph.nodes:
        if not values.isdisjoint(node.inputs):
            values.update(node.outputs)
            found.append(node)
    return _of_update(found)


def _before(graph: Graph, values: set[Value]) -> list[Edge]:
    """The edges of what these values are made of, up to the gradients."""
    found: list[Node] = []
    for node in reversed(graph.nodes):
        if not values.isdisjoint(node.outputs) and not is_differentiated(node.scope):
            values.update(node.inputs)
            found.append(node)
    return _of_update(found)


def _of_update(nodes: Iterable[Node]) -> list[Edge]:
    edges = chain.from_iterable(map(edges_of, nodes))
    return [edge for edge in edges if not is_differentiated(edge.node.scope)]


def _operands(edge: Edge) -> Side:
    return zip(edge.operands, edge.factors.operands, strict=True)


def _results(edge: Edge) -> Side:
    return zip(edge.results, edge.factors.results, strict=True)


def _both(edge: Edge) -> Side:
    return zip(edge.values, edge.factors.tensors, strict=True)


def _mixed(
    edges: Sequence[Edge], bits: Bits, come: Callable[[Edge], Side], go: Callable[[Edge], Side]
) -> int:
    """Spreads the bits from one side of edges to the other: those that meet a factor which mixes."""
    known: Bits = {}
    while bits != known:  # round loops
        known = dict(bits)
        for edge in edges:
            is_one = bool(edge.node.bodies)  # one value, outside of a body and within
            factors = _by_factor(_both(edge) if is_one else come(edge), bits)
            for v, dims in _both(edge) if is_one else go(edge):
                for dim, names in enumerate(dims):
                    for name in names:
                        if new := factors.get(name, 0):
                            bits[v, dim] = bits.get((v, dim), 0) | new
    found = 0
    for edge in edges:
        for name, bit in _by_factor(come(edge), bits).items():
            found |= bit if _mixes(edge, name) else 0
    return found


def _by_factor(side: Side, bits: Bits) -> dict[str, int]:
    found: dict[str, int] = {}
    for v, dims in side:
        for dim, names in enumerate(dims):
            for name in names:
                found[name] = found.get(name, 0) | bits.get((v, dim), 0)
    return found


def _mixes(edge: Edge, name: str) -> bool:
    entry = RULES.get(edge.node.name)
    if entry is not None and entry.of_parts:
        return False
    is_whole = "~" in name or edge.factors.types.get(name) == UNSPLIT
    is_product = entry is not None and entry.has_flops(edge.node)
    return is_whole or is_product and name in edge.factors.reduced

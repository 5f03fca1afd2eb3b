"""Opens primitives without a rule that are programs of JAX's functions, as those of libraries often are: the
equations of the program take the place of the primitive, and these have rules.

    unvmap_any x     ->     reduce_or x

The program is the function of which `mlir.lower_fun` made the lowering, because that is what `jax.jit` runs;
where the lowering was made otherwise, the primitive's own implementation. By then its own batching and
differentiation have been used. A rule that is registered for it goes before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.inline import inlined
from shardax.rewrites.rewrite import Context, Replacements
from shardax.spmd_rules.registry import RULES


def opened(graph: Graph, context: Context) -> Replacements:
    """What takes the place of primitives without a rule."""
    nodes: dict[Node, Sequence[Node]] = {}
    values: dict[Value, Value] = {}
    for node in graph.nodes:
        if not node.bodies and node.name not in RULES:
            found = _inside(node, [values.get(v, v) for v in node.inputs])
            if not isinstance(found, str):
                nodes[node], results = found
                values.update(zip(node.outputs, results, strict=True))
    return Replacements(nodes, values, again=bool(nodes))


def why_closed(node: Node) -> str:
    """Why a node was not opened; "" where there is nothing in it that could have been traced."""
    found = _inside(node, node.inputs)
    return found if isinstance(found, str) else ""


def _inside(node: Node, inputs: Sequence[Value]) -> tuple[list[Node], list[Value]] | str:
    """The nodes that a node is a program of, and what they give; or else why there are none."""
    why = ""
    for words, function in _jax.functions_of(node.primitive):
        try:
            jaxpr = _traced(node, function)
            why = _difference(node, jaxpr, words)
        except Exception as error:  # of any kind: another library wrote it, and maybe not for tracers
            why = f"its {words} cannot be traced ({type(error).__name__})"
            continue
        if not why:
            found = inlined(jaxpr, inputs, node)
            if not _holds(found[0], node):
                return found
    return why


def _traced(node: Node, function: Callable[..., Any]) -> Any:
    """The closed jaxpr of a function, traced as where JAX lowers the node's equation."""
    with _jax.in_context_of(node.eqn), _jax.lines_of_their_own():
        return _jax.dce(
            jax.make_jaxpr(partial(function, **node.params))(*(shape_of(v.aval) for v in node.inputs))
        )


def _difference(node: Node, jaxpr, words: str) -> str:
    """How a jaxpr is another program than the node, "" where it is the same."""
    made, wanted = _types(jaxpr.out_avals), _types([v.aval for v in node.outputs])
    if made != wanted:
        return f"its {words} gives {', '.join(made)}, and not {', '.join(wanted)}"
    missing = node.eqn.effects - jaxpr.effects
    return f"its {words} has not its effects, {', '.join(map(str, missing))}" if missing else ""


def _types(avals: Sequence[Any]) -> list[str]:
    return [f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in avals]


def _holds(nodes: list[Node], node: Node) -> bool:
    """Whether some are the node again, as of an implementation that only compiles the primitive."""
    types = _types([v.aval for v in node.inputs])
    return any(
        one.primitive is node.primitive and _types([v.aval for v in one.inputs]) == types
        for one in Graph([], nodes).walk()
    )

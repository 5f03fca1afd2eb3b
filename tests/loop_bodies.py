"""Bodies of scans by themselves, for tests of what is done to them."""

from jax import lax

from shardax.graph.affine import Affines
from shardax.graph.graph import Graph, Node
from shardax.graph.indices import Index
from tests.graph_text import graph_of


def row(x, i):
    """Row i, which is not below 0: nothing else is traced."""
    starts = (i, *[0] * (x.ndim - 1))
    return lax.dynamic_slice(x, starts, (1, *x.shape[1:]), allow_negative_indices=False)


def with_row(x, row, i):
    starts = (i, *[0] * (x.ndim - 1))
    return lax.dynamic_update_slice(x, row, starts, allow_negative_indices=False)


def loop_of(trip, *carry, length: int) -> tuple[Node, Index]:
    """The scan that runs trip(i, *carry), which gives the carry anew, and the index in its body."""

    def body(carry, _):
        i, *others = carry
        return (i + 1, *trip(i, *others)), None

    graph: Graph = graph_of(lambda *carry: lax.scan(body, (0, *carry), length=length)[0][1:], *carry)
    (scan,) = (node for node in graph.nodes if node.name == "scan")
    affines = Affines(graph)
    return scan, Index(affines, affines.iterations[scan])

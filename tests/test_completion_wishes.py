"""What products wish of their operands, where completion settled on something else."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardax.completion.node_classes import NodeClasses
from shardax.completion.wishes import wishes
from shardax.sharding import from_spec
from tests.choices import laid_out
from tests.graphs import graph

pytestmark = pytest.mark.quick


def of_experts(tokens_GEM, weights_EMF):
    return jnp.einsum("gem,emf->egf", jnp.tanh(tokens_GEM), weights_EMF)


def wished(f, shapes, specs):
    """For what each node makes the request, and the wish."""
    search = laid_out(graph(f, *shapes), specs)
    made = [(node.name, node.outputs[0]) for node in search.completion.graph.nodes]
    known = search.completion
    return {name: (known.sharding(v), known.wished.get(v)) for name, v in made if len(v.shape) == 3}


def test_tokens_that_come_by_groups_are_wished_by_experts():
    """The products' two operands have x along different dims: the tokens, which are larger, decide."""
    found = wished(of_experts, [(64, 8, 16), (8, 16, 32)], [P("x"), P("x")])
    assert found["tanh"] == (from_spec(P("x"), 3), from_spec(P(None, "x"), 3))
    product, wish = found["dot_general"]
    assert product == from_spec(P(None, "x"), 3) and wish == from_spec(P("x"), 3)


def test_each_product_wishes_along_its_batch():
    program = graph(of_experts, (64, 8, 16), (8, 16, 32))
    tokens, weights = program.inputs
    specs = {tokens: P("x"), weights: P("x")}
    found = wishes(program, NodeClasses(), lambda v: from_spec(specs.get(v, P(None, "x")), len(v.shape)))
    products = [node for node in program.nodes if node.name == "dot_general"]
    assert all(any(v in found for v in (*n.inputs, *n.outputs)) for n in products) and weights not in found


def test_what_other_dims_can_keep_they_keep():
    found = wished(of_experts, [(64, 8, 16), (8, 16, 32)], [P(("y", "x")), P("x")])
    assert found["tanh"][1] == from_spec(P("y", "x"), 3)


@pytest.mark.parametrize("specs", [(P("x"), P()), (P(), P("x")), (P("x", "y"), P("y")), (P(), P())])
def test_where_all_agree_nothing_is_wished(specs):
    found = wished(of_experts, [(64, 8, 16), (8, 16, 32)], specs)
    assert all(wish is None for _, wish in found.values())


def test_products_without_a_batch_wish_nothing():
    """What they have apart is a matter of tensor parallelism or gathered weights, which each product offers."""
    found = wished(lambda x, w: jnp.tanh(x) @ w, [(4, 64, 16), (16, 32)], [P(None, "x"), P(None, "x")])
    assert all(wish is None for _, wish in found.values())

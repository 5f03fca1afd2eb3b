"""What annotations say: those of shardax and those of JAX alike."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph import annotations
from shardax.sharding import NOTHING_OWED
from tests.graphs import auto_mesh, graph, the

pytestmark = pytest.mark.quick

MESH = auto_mesh(x=4, y=2)
SPEC = NamedSharding(MESH, P("x", P.UNCONSTRAINED))


def constrained(x):
    return jax.lax.with_sharding_constraint(x, SPEC)


def note_of(f, shape=(8, 4, 3)):
    with jax.sharding.use_abstract_mesh(MESH):
        return annotations.of_node(graph(f, shape).nodes[-1])


def test_of_our_own():
    note = note_of(lambda x: sx.annotate(x, P(None, "y")))
    assert (note.dims, note.role, note.like) == (((), ("y",), ()), "inside", None)
    assert not note.is_of_result


def test_of_jax():
    """Dims that the spec does not name are whole, UNCONSTRAINED ones are open."""
    note = note_of(constrained)
    assert (note.dims, note.role, note.mesh) == ((("x",), None, ()), "inside", MESH)
    assert note.source.startswith("with_sharding_constraint at ")
    assert __file__ in note.source


def test_nothing_else_is_an_annotation():
    assert note_of(jnp.sin) is None
    program = graph(lambda x: jnp.sin(constrained(jnp.cos(x))), (8, 4))
    assert [node.name for node, _ in annotations.among(program.nodes)] == ["sharding_constraint"]


def test_only_names_of_arguments_and_results_rename():
    """What is annotated inside lies so from then on."""
    with jax.sharding.use_abstract_mesh(MESH):
        node = the("annotate", graph(lambda x: sx.annotate(jnp.cos(x), P("x")), (8, 4)))
    assert not annotations.renames(node)
    for role in ("argument", "result", "implied"):
        node.params = {**node.params, "role": role}
        assert annotations.renames(node)
    assert not annotations.renames(the("sharding_constraint", graph(constrained, (8, 4))))


def test_a_called_program_has_other_inputs():
    """Which argument a result succeeds holds only in the program whose result it is."""
    with jax.sharding.use_abstract_mesh(MESH):
        node = the("annotate", graph(lambda x: sx.annotate(x, P("x")), (8, 4)))
    node.params = {**node.params, "like": 0}
    assert annotations.of_node(node).like == 0
    node.callers = (node.eqn,)
    assert annotations.of_node(node).like is None


def eqn_of(f):
    return jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 4), "float32")).eqns[-1]


@pytest.mark.parametrize(
    "f, specs",
    [
        (constrained, [P("x", P.UNCONSTRAINED)]),
        (lambda x: jax.jit(jnp.sin, out_shardings=NamedSharding(MESH, P("y")))(x), [P("y")]),
        (lambda x: jax.jit(jnp.sin)(x), []),
        (lambda x: jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x), [P()]),
        (jnp.sin, []),
    ],
)
def test_shardings_of_an_equation(f, specs):
    found = list(annotations.shardings_of(eqn_of(f)))
    assert [sharding.spec for sharding in found] == specs
    assert {sharding.mesh for sharding in found} <= {MESH}


def test_meshes_whose_axes_an_equation_names():
    island = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    whole = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P()))  # noqa: E731
    assert [list(annotations.meshes_of(eqn_of(f))) for f in (constrained, island, whole, jnp.sin)] == [
        [MESH],
        [MESH],
        [],
        [],
    ]


def test_an_equation_of_jax_as_ours():
    assert annotations.as_annotation(eqn_of(constrained)) | {"source": ""} == {
        "dims": (("x",), None),
        "owing": NOTHING_OWED,
        "source": "",
        "role": "inside",
        "like": None,
        "mesh": MESH,
    }
    assert annotations.name_of(eqn_of(constrained)) == "with_sharding_constraint"
    assert annotations.name_of(eqn_of(jnp.sin)) == "sin"

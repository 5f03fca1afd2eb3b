"""Stages that begin where a module does: of Flax linen, of named scopes, in unrolled layers and in scans."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.reports import reports
from shardax.ledger.causes import Cause, named
from shardax.pipeline.call import Call
from shardax.pipeline.scopes import module, modules, names_of, patterns, scope

pytestmark = [pytest.mark.quick, pytest.mark.promotes_ranks]

M, V, LAYERS = 16, 11, 4
MESH = AbstractMesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((16, 6), "int32")


def linen(remat: bool = False):
    """A loss of a Flax model, and the shapes of its parameters."""
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, h):
            return h + nn.Dense(M)(nn.gelu(nn.Dense(2 * M)(h)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Embed(V, M)(x)
            for _ in range(LAYERS):
                h = (nn.remat(Block) if remat else Block)()(h)
            return nn.Dense(V, name="head")(h)

    model = Model()

    def loss(params, x):
        return (model.apply(params, x) ** 2).mean()

    return loss, jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(X.shape, X.dtype)))


def layer(w, h):
    with jax.named_scope("Layer"):
        return h + jnp.tanh(h @ w)


def scanned(w, x):
    h = jax.nn.one_hot(x, M)
    return (jax.lax.scan(lambda h, w: (layer(w, h), None), h, w)[0] ** 2).mean()


STACK = jax.ShapeDtypeStruct((LAYERS, M, M), "float32")


def names(loss, params, *at: str, stages: int = 2) -> list[str]:
    """Of the places where stages may begin."""
    found = []

    def run(*args):
        call = Call.of(loss, args, {}, (0,), None, "stage", 4, at)
        region = call.of_gradients("mean", has_aux=False)[0].loop
        region.cut(region.schedule("1f1b", stages, 4, None)[0])
        found.extend(region.flow.mark_names)

    with jax.sharding.use_abstract_mesh(MESH):
        jax.eval_shape(run, params, X)
    return found


def test_stages_begin_with_modules():
    loss, params = linen()
    assert names(loss, params, "Block_*") == [f"Block_{i}" for i in range(LAYERS)]
    assert names(loss, params, "Block_[12]", "head") == ["Block_1", "Block_2", "head"]
    assert names(loss, params, "Block_2/Dense_1") == ["Dense_1"]
    loss, params = linen(remat=True)
    assert names(loss, params, "*Block_*") == [f"CheckpointBlock_{i}" for i in range(LAYERS)]


def test_layers_of_a_scan_are_modules():
    """But the first, with which the first stage begins."""
    assert names(scanned, STACK, "Layer") == ["Layer"] * (LAYERS - 1)


def test_both_forms_begin_there():
    """In the second block and not where the stages would take equally long."""
    loss, params = linen()
    how = {"mesh": MESH, "in_shardings": (None, P("data"))}
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, at="Block_1")
    pipeline = sx.pipeline.Pipeline(microbatches=4, at=["Block_1"])
    plans = (
        sx.shard_jit(grad, **how).plan(params, X),
        sx.shard_jit(jax.value_and_grad(loss), transforms=[pipeline], **how).plan(params, X),
    )
    first, second = (reports(plan)[0].data["stages"] for plan in plans)
    (one, two) = (stages[1]["begins"] for stages in (first, second))
    assert one["marked"] and two["marked"]
    assert [one["here"][k] for k in ("line", "crossing")] == [two["here"][k] for k in ("line", "crossing")]
    assert 1.5 < first[1]["forward"] / first[0]["forward"]  # three blocks and the head to one block


def test_nothing_matches():
    loss, params = linen()
    with pytest.raises(
        ValueError, match=r"at is 'Blok_\*', .* has scopes Model, Embed_0, .*Block_0, Dense_1"
    ):
        names(loss, params, "Blok_*")
    with pytest.raises(ValueError, match="has no named scopes, as Flax nnx makes none; .* jax.named_scope"):
        names(
            lambda w, x: (jax.nn.one_hot(x, M) @ w).mean(), jax.ShapeDtypeStruct((M, M), "float32"), "Block"
        )
    with pytest.raises(
        ValueError,
        match=r"4 virtual stages need 3 .* match 'Block_3' and 'head' begin at 2 \(Block_3, head\)",
    ):
        names(loss, params, "Block_3", "head", stages=4)


def test_why_something_is_sent_is_no_scope():
    """Errors named `slice[noted in P('microbatch', None)]` among the scopes."""

    def local(x):
        with jax.named_scope("a"), jax.named_scope(named("slice", "noted in P('x')", Cause())):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(local)(X.update(dtype="float32")).jaxpr.eqns
    assert scope(eqn) == ("a",) and names_of([eqn]) == ["a"]


@pytest.mark.parametrize("at", [3, "", ["a", ""], {"a"}])
def test_bad_patterns(at):
    with pytest.raises(ValueError, match="at of Pipeline .* a pattern of names of scopes"):
        sx.pipeline.Pipeline(microbatches=4, at=at)
    assert patterns(None, "it") == () and patterns("a", "it") == ("a",)


def test_scopes():
    with jax.named_scope("a"), jax.named_scope("b"):
        closed = jax.make_jaxpr(jax.value_and_grad(scanned))(STACK, X)
    (scan, *_) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    assert "Layer" in names_of([scan]) and "Layer" in (modules(scan, ["Lay*"]) or ())
    assert module(scope(scan), ["c"]) is None

"""Several meshes in one program: results as under plain jax.jit, and what is sent between annotations on
them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

DEVICES = np.array(jax.devices())


def make(shape, names, devices=DEVICES, kind=AxisType.Auto):
    return Mesh(devices[: int(np.prod(shape))].reshape(shape), names, axis_types=(kind,) * len(shape))


A, B = make((2, 4), ("x", "y")), make((4, 2), ("x", "y"))
FLAT, THREE = make((8,), ("z",)), make((2, 2, 2), ("a", "b", "c"))
TRANSPOSED = Mesh(A.devices.T, ("p", "q"))
REVERSED = Mesh(A.devices.ravel()[::-1].reshape(2, 4), ("x", "y"))
SIX, OTHER_SIX = make((2, 3), ("x", "y")), make((3, 2), ("x", "y"))
X = np.random.RandomState(0).randn(64, 48).astype("float32")
W = np.random.RandomState(1).randn(48, 48).astype("float32")

MESHES = {
    "4x2 in 2x4": (A, B),
    "2x4 in 4x2": (B, A),
    "flat in 2x4": (A, FLAT),
    "2x4 in flat": (FLAT, A),
    "three axes": (A, THREE),
    "2x4 in three": (THREE, A),
    "transposed": (A, TRANSPOSED),
    "reversed": (A, REVERSED),
    "3x2 in 2x3": (SIX, OTHER_SIX),
    "abstract": (A, AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)),
}


def program(one, other, wsc=jax.lax.with_sharding_constraint):
    """A chain of annotations on two meshes, over products, sums and slices."""
    first, last = (
        NamedSharding(one, P(one.axis_names[0])),
        NamedSharding(other, P(None, other.axis_names[-1])),
    )

    def run(x, w):
        y = wsc(jnp.tanh(x), first) @ w
        y = sx.annotate(y, last) - wsc(x, NamedSharding(other, P(other.axis_names[0]))).sum(1, keepdims=True)
        return y[: y.shape[0] // 2], sx.annotate(y.sum(0), NamedSharding(one, P(one.axis_names)))

    return run


def assert_same(got, want, rtol=1e-5):
    compare = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(lambda a, b: compare(np.asarray(a, "float32"), np.asarray(b, "float32")), got, want)


def plain(x, w):
    y = jnp.tanh(x) @ w - x.sum(1, keepdims=True)
    return y[: y.shape[0] // 2], y.sum(0)


def check(name, rows, dtype, tolerance):
    one, other = MESHES[name]
    x, w, f = X[:rows].astype(dtype), W.astype(dtype), sx.shard_jit(program(one, other), mesh=one)
    assert_same(f(x, w), jax.jit(plain)(x, w), tolerance)


@pytest.mark.parametrize("name", MESHES)
def test_uneven(name):
    check(name, 37, "float32", 1e-4)


@pytest.mark.parametrize("name", ["4x2 in 2x4", "3x2 in 2x3"])
def test_bfloat16(name):
    check(name, 64, "bfloat16", 0.1)


@pytest.mark.parametrize("name", ["4x2 in 2x4", "3x2 in 2x3"])
def test_gradient(name):
    one, other = MESHES[name]
    f = sx.shard_jit(program(one, other), mesh=one)

    def loss(f, x, w):
        half, total = f(x, w)
        return (half**2).sum() + jnp.sin(total).sum()

    want = jax.grad(partial(loss, plain), (0, 1))(X, W)
    assert_same(jax.grad(partial(loss, f), (0, 1))(X, W), want, 1e-3)
    assert_same(
        sx.shard_jit(jax.grad(partial(loss, program(one, other)), (0, 1)), mesh=one)(X, W), want, 1e-3
    )


SENT = {
    "a finer split": (NamedSharding(A, P("x")), NamedSharding(B, P("x")), {}),
    "a coarser split": (NamedSharding(B, P("x")), NamedSharding(A, P("x")), {"all_gather": 3072}),
    "another dim": (NamedSharding(A, P("x")), NamedSharding(B, P(None, "x")), {"all_to_all": 2304}),
    "a minor part": (
        NamedSharding(A, P("y")),
        NamedSharding(B, P("y")),
        {"ppermute": 3072, "all_gather": 3072},
    ),
    "one axis moves": (NamedSharding(B, P("x", "y")), NamedSharding(FLAT, P("z")), {"all_to_all": 768}),
    "transposed": (NamedSharding(A, P("x", "y")), NamedSharding(TRANSPOSED, P("q", "p")), {}),
    "reversed": (NamedSharding(A, P("x", "y")), NamedSharding(REVERSED, P("x", "y")), {}),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    """Of 12 KiB: what a device wants and lacks, never the whole array."""
    source, target, sent = SENT[name]
    f = sx.shard_jit(lambda x: sx.annotate(jnp.sin(x), target), mesh=A, in_shardings=source)
    assert {c.kind: c.total for c in f.plan(X).collectives} == sent
    np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-6)


def named(sharding, got):
    assert got.sharding.mesh == sharding.mesh and got.sharding.is_equivalent_to(sharding, got.ndim), (
        got.sharding
    )


@pytest.mark.parametrize(
    "other", [B, FLAT, REVERSED, TRANSPOSED], ids=["4x2", "flat", "reversed", "transposed"]
)
def test_results_are_on_the_users_meshes(other):
    wanted = NamedSharding(A, P("y")), NamedSharding(other, P(other.axis_names[-1]))
    f = sx.shard_jit(lambda x: (jnp.sin(x), x * 2), mesh=A, out_shardings=wanted)
    for x in (X, X, jax.device_put(X, NamedSharding(B, P("x")))):
        got = f(x)
        for sharding, result, want in zip(wanted, got, (np.sin(X), X * 2), strict=True):
            named(sharding, result)
            np.testing.assert_allclose(result, want, rtol=1e-6)
    assert_same(jax.jit(f)(X), (np.sin(X), X * 2))


def test_arguments_on_several_meshes_rest_there():
    specs = NamedSharding(A, P("x", None)), NamedSharding(B, P("x", None))
    f = sx.shard_jit(jnp.add, in_shardings=specs)
    placed = [jax.device_put(X, s) for s in specs]
    assert_same(f(*placed), X + X)
    plan = f.plan(*placed)
    assert plan.in_shardings == specs and not plan.collectives
    assert "P('x') on (x=4, y=2)" in str(plan) and "x is x y.0; y is y.1" in str(plan)
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(
        f.lower(*placed).compile().as_text().split()
    )


def test_committed_elsewhere_needs_no_annotation():
    f = sx.shard_jit(lambda x: x * 2, mesh=A)
    x = jax.device_put(X, NamedSharding(B, P("x")))
    assert f.plan(x).in_shardings == (NamedSharding(B, P("x", None)),) and not f.plan(x).collectives
    assert_same(f(x), X * 2)


@pytest.mark.parametrize("other", [REVERSED, TRANSPOSED], ids=["reversed", "transposed"])
def test_arguments_in_another_order_are_brought(other):
    x = jax.device_put(X, NamedSharding(other, P(other.axis_names[0])))
    f = sx.shard_jit(lambda x, y: jnp.sin(x) + y, mesh=A, in_shardings=(None, P("x")))
    for _ in range(2):
        assert_same(f(x, X), np.sin(X) + X)
    assert_same(f(X, X), np.sin(X) + X)
    assert_same(f(x, X), np.sin(X) + X)


def heads(count, x, p):
    b, s, m = x.shape
    q, k, v = ((x @ p[name]).reshape(b, s, count, m // count) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k))
    return jnp.einsum("bnst,btnd->bsnd", weights, v).reshape(b, s, m) @ p["o"]


HEADS = {"4 on 8": (make((8,), ("model",)), 4), "2 on 4": (make((2, 4), ("data", "model")), 2)}


@pytest.mark.once
@pytest.mark.parametrize("name", HEADS)
def test_heads_inside_an_axis(name):
    """An axis of more devices than there are heads is refined: nothing is gathered at the reshapes."""
    mesh, count = HEADS[name]
    p = {n: np.random.RandomState(i).randn(32, 32).astype("float32") / 6 for i, n in enumerate("qkvo")}
    x = np.random.RandomState(9).randn(4, 8, 32).astype("float32")
    specs = (
        P("data" if "data" in mesh.shape else None),
        {**dict.fromkeys("qkv", P(None, "model")), "o": P("model")},
    )
    options = sx.Options(chip="v5e")  # one message, not several
    f = sx.shard_jit(partial(heads, count), mesh=mesh, in_shardings=specs, options=options)
    assert_same(f(x, p), jax.jit(partial(heads, count))(x, p), 1e-4)
    plan = f.plan(x, p)
    assert not any("reshape" in c.reason for c in plan.collectives) and plan.comm_bytes <= 8192
    assert plan.refinement.sizes["model.0"] == count and "all_reduce over model" in str(plan)
    assert plan.in_shardings[1]["q"].spec == P(None, "model")


def test_gradient_with_types_of_the_axis_that_is_refined():
    """JAX types what goes into the backward pass by the axes of the mesh in context, as they are there."""
    f = lambda x: jnp.tanh(jnp.tanh(x).reshape(2, 4, 6)).sum(1)  # noqa: E731
    mesh, x = make((4, 2), ("x", "y"), kind=AxisType.Explicit), X[:8, :6]
    sharded = sx.shard_jit(f, mesh=mesh, in_shardings=P("x", "y"))
    with jax.set_mesh(mesh):
        got = jax.grad(lambda x: (sharded(x) ** 2).sum())(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: (f(x) ** 2).sum())(x), rtol=1e-5, atol=1e-6)


def test_the_scores_of_long_sequences_are_not_reduced():
    """The minor part of a cut axis splits a product only where that sends less."""
    mesh, count = HEADS["4 on 8"]
    p = {n: np.random.RandomState(i).randn(32, 32).astype("float32") / 6 for i, n in enumerate("qkvo")}
    x = np.random.RandomState(9).randn(4, 128, 32).astype("float32")
    specs = P(), {**dict.fromkeys("qkv", P(None, "model")), "o": P("model")}
    f = sx.shard_jit(partial(heads, count), mesh=mesh, in_shardings=specs)
    assert_same(f(x, p), jax.jit(partial(heads, count))(x, p), 1e-4)
    plan = f.plan(x, p)
    assert (4, 1, 128, 128) not in [c.shape for c in plan.collectives]
    assert (
        plan.comm_bytes <= 2 * 8192 + 114688
    )  # to gather queries and keys, and to sum over the axis what o makes


def test_no_reshape_in_need_changes_nothing():
    f = sx.shard_jit(lambda x: x.reshape(8, 8, 48), mesh=A, in_shardings=P(("x", "y")))
    assert f.plan(X).refinement.is_trivial
    annotated = sx.shard_jit(lambda x: sx.annotate(x.reshape(2, 32, 48), P()), mesh=A, in_shardings=P("y"))
    assert annotated.plan(X).refinement.is_trivial


def test_islands_keep_their_names():
    def island(a):
        return (
            a * jax.lax.axis_index("y").astype("float32")
            + jax.lax.psum(a, ("x", "y"))
            + jax.lax.ppermute(a, "y", [(0, 1), (3, 2)])
        )

    mapped = jax.shard_map(island, mesh=A, in_specs=P("y", "x"), out_specs=P("y", "x"))
    f = sx.shard_jit(
        lambda x: sx.annotate(mapped(sx.annotate(x, NamedSharding(B, P("x")))), NamedSharding(B, P("y"))),
        mesh=A,
    )
    assert_same(f(X), jax.jit(mapped)(X))


def test_names_on_differently_factored_meshes():
    def f(x):
        y = sx.mesh_split(x, A, [0, 1]) * 2
        y = sx.mark_sharding(y, B, (("y", 0), None)) + 1
        return sx.redistribute(y, FLAT, [sx.Shard(1)])

    got = sx.shard_jit(f, mesh=A)(X)
    named(NamedSharding(FLAT, P(None, "z")), got)
    assert_same(got, X * 2 + 1)
    assert_same(f(X), X * 2 + 1)
    with pytest.raises(ValueError, match="uses 'x' of the mesh .x=4, y=2. twice"):
        sx.shard_jit(lambda x: sx.mesh_split(x, B, [0, 0]), mesh=A)(X)


INSIDE = {
    "jit": lambda x, s, t: jax.jit(
        lambda a, b: (jnp.sin(a) @ b, b), in_shardings=(s, None), out_shardings=(t, None)
    )(x, x.T)[0],
    "device_put": lambda x, s, t: jnp.sin(jax.device_put(x, s)) @ jax.device_put({"b": x.T}, t)["b"],
    "shard_jit": lambda x, s, t: sx.shard_jit(
        lambda x: jnp.sin(x) @ x.T, mesh=s.mesh, in_shardings=s, out_shardings=t
    )(x),
}


@pytest.mark.once
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("meshes", ["reversed", "3x2 in 2x3"])
def test_calls_inside_on_another_mesh(name, meshes):
    one, other = MESHES[meshes]
    s, t = NamedSharding(other, P(other.axis_names[0])), NamedSharding(other, P(None, other.axis_names[1]))
    f = sx.shard_jit(lambda x: INSIDE[name](x, s, t) + 1, mesh=one, in_shardings=P("x"))
    for rows in (24, 48) if name != "shard_jit" else (64, 37):  # JAX refuses uneven sizes in the others
        assert_same(f(X[:rows]), np.sin(X[:rows]) @ X[:rows].T + 1, 1e-4)
    assert_same(
        jax.grad(lambda x: f(x).sum())(X[:48]), jax.grad(lambda x: (jnp.sin(x) @ x.T).sum())(X[:48]), 1e-4
    )
    assert {"shard_jit": "in_shardings"}.get(name, name) in str(f.plan(X[:48]))


def test_a_boundary_is_in_the_plan():
    f = sx.shard_jit(
        lambda x: sx.annotate(x, NamedSharding(OTHER_SIX, P("x"))), mesh=SIX, in_shardings=P("x")
    )
    text = " ".join(str(f.plan(X[:48])).split())
    assert (
        "(x=3, y=2): x is y; y is x. A boundary: inside, shards of these sizes lie on other devices than "
        "it says;" in text
    )
    assert "annotate on (x=3, y=2) in P('y', None)" in text

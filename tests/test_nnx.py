"""Flax nnx: functions of objects, which change in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardax as sx
import shardax.flax
from models.devices import make_mesh

pytestmark = pytest.mark.mixed_dtypes

MESH = {"data": 2, "model": 4}
X = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, min_dim_size_to_factor=8))


class Block(nnx.Module):
    """30 hidden units, which no mesh here divides but by 2; each call is counted."""

    split = staticmethod(nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model")))

    def __init__(self, rngs):
        self.up = nnx.Linear(10, 30, use_bias=False, kernel_init=self.split, rngs=rngs)
        self.norm = nnx.BatchNorm(30, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(
            30,
            12,
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model")),
            rngs=rngs,
        )
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(nnx.relu(self.dropout(self.norm(self.up(x)))))


@pytest.fixture(autouse=True)
def unsharded_outside():
    """nnx would place each Variable on the mesh in context when it is made, and refuse sizes that do not
    divide.
    """
    with nnx.use_eager_sharding(False):
        yield


def create():
    model = Block(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average())


def train_step(model, optimizer, metrics, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x)[:, :10] - x) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(values=value)
    return value


def train(create, step):
    objects = create()
    return objects, [float(step(*objects, X)) for _ in range(4)]


def on_mesh(fun, **options):
    return sx.flax.shard_jit(fun, mesh=make_mesh(MESH), **options)


def train_step_on_mesh():
    return on_mesh(train_step, in_shardings=(None, None, None, P("data")), donate_argnums=(0, 1, 2))


def values(objects):
    leaves = jax.tree.leaves(nnx.state(objects))
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]


def test_model_optimizer_rngs_and_metrics_are_written_back():
    expected, losses = train(nnx.jit(create), nnx.jit(train_step))
    (model, optimizer, metrics), found = train(on_mesh(create), train_step_on_mesh())
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for x, y in zip(values((model, optimizer, metrics)), values(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0]
    assert (int(model.calls[...]), int(optimizer.step[...]), int(model.dropout.rngs.count[...])) == (4, 4, 4)
    np.testing.assert_allclose(metrics.compute()["loss"], np.mean(losses), rtol=1e-5)


def test_metadata_says_how_parameters_rest_and_their_moments_follow():
    model, optimizer, _ = nnx.eval_shape(create)
    step = train_step_on_mesh()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average())
    state, moments, _ = sx.flax.abstract_state(step, model, optimizer, metrics, X, argnums=(0, 1, 2))
    specs = {"/".join(map(str, path)): x.get_value().sharding.spec for path, x in nnx.to_flat_state(moments)}
    assert state["up"]["kernel"].sharding.spec == P("data", None)
    assert state["down"]["kernel"].sharding.spec == P(None, "model")
    factored = {k: s for k, s in specs.items() if "v_" in k and "kernel" in k}
    assert sorted(map(str, factored.values())) == ["P('data',)", "P('model',)", "P(None,)", "P(None,)"]


def test_sharded_init():
    """Objects that a function makes lie as `abstract_state` says, from their first moment on."""
    step = train_step_on_mesh()
    wanted = sx.flax.abstract_state(step, *nnx.eval_shape(create), X, argnums=(0, 1, 2))
    made = on_mesh(create, out_shardings=wanted)()
    same = jax.tree.map(
        lambda a, x: a.sharding.is_equivalent_to(x.sharding, x.ndim), wanted, tuple(map(nnx.state, made))
    )
    assert all(jax.tree.leaves(same))
    for x, y in zip(values(made), values(nnx.jit(create)()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_shared_objects_stay_shared():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 4, rngs=rngs)
            self.two = self.one

    pair = Pair(nnx.Rngs(0))

    def double(pair, again, linear):
        linear.bias[...] += 1.0
        return again["pair"].two

    out = on_mesh(double)(pair, {"pair": pair}, linear=pair.one)
    assert out is pair.one is pair.two
    np.testing.assert_array_equal(out.bias[...], np.ones(4, np.float32))


def test_what_is_added_and_changed_comes_back():
    model = Block(nnx.Rngs(0))

    def grow(model, x):
        model.seen = nnx.Variable(jnp.sum(x))
        model.label = "grown"
        model.eval()
        return x * 2

    np.testing.assert_array_equal(on_mesh(grow, in_shardings=(None, P("data")))(model, X), X * 2)
    assert model.label == "grown" and model.dropout.deterministic
    np.testing.assert_allclose(model.seen[...], X.sum(), rtol=1e-5)


def test_arguments_of_every_kind():
    """Static ones by number and by name, plain pytrees, a State, None."""
    model = Block(nnx.Rngs(0))

    def f(model, power, batch, state, nothing, *, scale=1.0, mode="sum"):
        assert nothing is None and mode in ("sum", "mean")
        return getattr(jnp, mode)(model.up(batch["x"]) ** power) * scale + jnp.sum(state["down"]["bias"][...])

    step = on_mesh(
        f, static_argnums=1, static_argnames="mode", in_shardings=(None, {"x": P("data")}, None, None)
    )
    state = nnx.state(model, nnx.Param)
    args = (model, 3, {"x": X}, state, None)
    for options in ({}, {"scale": 2.0, "mode": "mean"}):
        np.testing.assert_allclose(step(*args, **options), f(*args, **options), rtol=1e-5)


def test_in_shardings_count_what_is_not_static():
    """Said of an object, a sharding holds instead of its metadata: nothing is brought to that."""
    step = on_mesh(lambda power, model, x: model.up(x) ** power, static_argnums=0, in_shardings=(P(), None))
    assert not step.plan(3, Block(nnx.Rngs(0)), X).collectives


def test_shardings_of_an_object():
    """A spec for all of it, or a State of specs, instead of its metadata."""
    model = Block(nnx.Rngs(0))
    specs = sx.flax.specs(nnx.state(model))
    assert specs["up"]["kernel"].get_value() == P("data", "model")
    assert specs["down"]["bias"].get_value() is None
    for given, expected in ((P(), P(None, None)), (specs, P("data", None)), (None, P("data", None))):
        step = on_mesh(lambda model, x: model.up(x), in_shardings=(given, P()))
        assert sx.flax.abstract_state(step, model, X)["up"]["kernel"].sharding.spec == expected


@pytest.mark.parametrize("form", ["get_partition_spec", "get_named_sharding", "tree.map", "pure", "prefix"])
def test_states_of_shardings(form):
    """`jax.jit` takes each of them for the state of a module too, and for what has states in it."""
    mesh = make_mesh(MESH)
    _, state = nnx.split(nnx.Linear(10, 12, kernel_init=Block.split, rngs=nnx.Rngs(0)))
    names = nnx.get_partition_spec(state)
    given, specs = {
        "get_partition_spec": (state, names),
        "get_named_sharding": (state, nnx.get_named_sharding(state, mesh)),
        "tree.map": (state, jax.tree.map(lambda x: P("data", "model") if x.ndim > 1 else P(), state)),
        "pure": (nnx.to_pure_dict(state), nnx.to_pure_dict(names)),
        "prefix": (state, nnx.State({"kernel": P("data", "model"), "bias": P()})),
    }[form]

    def double(states):
        return jax.tree.map(lambda x: 2 * x, states)

    specs = {"model": specs, "rest": P()}
    found = sx.shard_jit(double, mesh=mesh, in_shardings=(specs,), out_shardings=specs)(
        {"model": given, "rest": [X]}
    )
    assert jax.tree.structure(found["model"]) == jax.tree.structure(given)
    kernel = jax.tree.leaves(found["model"]["kernel"])[0]
    assert kernel.sharding.spec == P("data", "model")
    np.testing.assert_array_equal(kernel, 2 * jax.tree.leaves(given["kernel"])[0])


def test_logical_names():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("inputs", "hidden"))
    state = nnx.state(nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0)))
    rules = (("inputs", None), ("hidden", "model"))
    assert sx.flax.specs(state, rules)["kernel"].get_value() == P(None, "model")
    assert state["kernel"].get_metadata().get("sharding_rules") is None


def test_a_module_is_a_pytree_too():
    """Where nothing is to be written back, `shard_jit` itself takes a module."""
    model = Block(nnx.Rngs(0))
    up = sx.shard_jit(lambda model, x: model.up(x), mesh=make_mesh(MESH), in_shardings=(None, P("data")))
    np.testing.assert_allclose(up(model, X), model.up(X), rtol=0, atol=1e-6)


def test_traces_once():
    traces = []

    def count(model, x):
        traces.append(1)
        model.calls[...] += 1
        return model.down(model.up(x))

    model, step = Block(nnx.Rngs(0)), on_mesh(count, in_shardings=(None, P("data")))
    for _ in range(3):
        step(model, X)
    assert len(traces) == 1 and int(model.calls[...]) == 3  # the second time on arrays that are on the mesh


def test_plan_and_lower():
    step, model = on_mesh(lambda model, x: model.up(x), in_shardings=(None, P("data"))), Block(nnx.Rngs(0))
    plan = step.plan(model, X)
    assert plan.comm_bytes > 0  # the kernel is split over the batch's axis
    assert "up/kernel" in str(plan)
    assert "sharding" in step.lower(model, X).as_text()


def test_not_of_nnx():
    with pytest.raises(ValueError, match="which shardax.flax.shard_jit did not make"):
        sx.flax.abstract_state(sx.shard_jit(lambda x: x, mesh=make_mesh(MESH)), X)


def test_arguments_by_name():
    """in_shardings says how they rest too; others rest as their metadata says."""

    def scaled(model, x, scale=None):
        return 2 * model(x)

    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    step = shardax.flax.shard_jit(scaled, mesh=make_mesh(MESH), in_shardings=(None, P("data"), None))
    x = np.ones((6, 8), np.float32)
    wanted = 2 * model(x)
    for got in (step(model, x=x, scale=1.0), step(x=x, scale=1.0, model=model), step(model, x, 1.0)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)

"""Flax linen: names of dims as shardings, boxes in arguments and in trees of shardings, mutable
collections.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
import shardax.flax
from models.devices import make_mesh

pytestmark = pytest.mark.mixed_dtypes

MESH = {"data": 2, "model": 4}
RULES = (("batch", "data"), ("inputs", None), ("hidden", "model"), ("outputs", None))
X = np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32)


class Network(nn.Module):
    """Batch norm between two layers of 30 hidden units, which no mesh here divides but by 2."""

    name_dims: bool = True
    logical: bool = True

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(30, kernel_init=self._named("inputs", "hidden"), name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(8, kernel_init=self._named("hidden", "outputs"), name="down")(nn.relu(x))

    def _named(self, *names):
        init = nn.initializers.lecun_normal()
        axes = tuple(dict(RULES)[n] for n in names)
        if not self.name_dims:
            return init
        return nn.with_logical_partitioning(init, names) if self.logical else nn.with_partitioning(init, axes)


class TrainStateWithStats(TrainState):
    batch_stats: dict


TX = optax.adamw(1e-2, eps=1e-3)
MODELS = {"logical": Network(), "axes": Network(logical=False)}


def init(model, key):
    variables = model.init(key, X)
    return TrainStateWithStats.create(
        apply_fn=model.apply, params=variables["params"], tx=TX, batch_stats=variables["batch_stats"]
    )


def train_step(state, x):
    def loss(params):
        y, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads).replace(batch_stats=new["batch_stats"]), value


def five_steps(state, step):
    losses = []
    for _ in range(5):
        state, loss = step(state, X)
        losses.append(float(loss))
    return state, losses


def near(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), found, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_boxed_train_state_with_batch_stats(kind):
    """Boxed parameters, their optimizer state and statistics: initialized sharded, trained as on one
    device.
    """
    model, mesh = MODELS[kind], make_mesh(MESH)
    shapes = jax.eval_shape(lambda key: init(model, key), jax.random.key(0))
    specs = sx.flax.specs(shapes, RULES if kind == "logical" else None)
    step = sx.shard_jit(train_step, mesh=mesh, in_shardings=(specs, P("data")), donate_argnums=0)
    state = sx.abstract_state(step, shapes, X)
    made = sx.shard_jit(lambda key: init(model, key), out_shardings=state)(jax.random.key(0))
    up = made.params["up"]["kernel"]
    assert isinstance(up, nn.LogicallyPartitioned if kind == "logical" else nn.Partitioned)
    assert up.value.sharding.spec == P("model") == made.opt_state[0].mu["up"]["kernel"].value.sharding.spec

    expected, losses = five_steps(
        jax.jit(lambda key: init(model, key))(jax.random.key(0)), jax.jit(train_step)
    )
    found, sharded_losses = five_steps(made, step)
    near(sharded_losses, losses)
    near(found, expected)
    assert losses[-1] < losses[0]


def placed(in_shardings, params):
    """How a kernel rests under a tree of shardings."""
    step = sx.shard_jit(
        lambda params, x: MODELS["axes"].apply(params, x, train=False),
        mesh=make_mesh(MESH),
        in_shardings=in_shardings,
    )
    return sx.abstract_state(step, params, X)


def kernels(tree):
    return {k: jax.tree.leaves(tree["params"][k]["kernel"])[0].sharding.spec for k in ("up", "down")}


@pytest.mark.parametrize("boxed", [True, False])
def test_shardings_in_every_form_of_flax(boxed):
    """Boxes themselves, specs of them and NamedShardings of them, for boxed and unboxed parameters."""
    mesh, shapes = make_mesh(MESH), jax.eval_shape(MODELS["logical"].init, jax.random.key(0), X)
    names = nn.get_partition_spec(shapes)
    params = shapes if boxed else meta.unbox(shapes)
    with nn.logical_axis_rules(RULES):
        forms = [
            shapes,
            sx.flax.specs(shapes),
            nn.logical_to_mesh_sharding(names, mesh),
            nn.logical_to_mesh(names),
        ]
        found = [kernels(placed((form, P("data")), params)) for form in forms]
    assert found == [{"up": P("model", None), "down": P(None, "model")}] * 4


def test_axes_in_boxes():
    mesh = make_mesh(MESH)
    shapes = jax.eval_shape(MODELS["axes"].init, jax.random.key(0), X)
    expected = {"up": P("model", None), "down": P(None, "model")}
    for form in (shapes, sx.flax.specs(shapes), nn.get_partition_spec(shapes), nn.get_sharding(shapes, mesh)):
        assert kernels(placed((form, P("data")), meta.unbox(shapes))) == expected


def test_constraints_inside():
    """`nn.with_logical_constraint` is an annotation where rules and a mesh are in context, as they are inside
    `shard_jit`.
    """

    def f(x):
        return nn.with_logical_constraint(2 * x, ("batch", "hidden"))

    with nn.logical_axis_rules(RULES):
        plan = sx.shard_jit(f, mesh=make_mesh(MESH)).plan(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert plan.out_shardings.spec == P("data", "model")


def test_what_an_optimizer_puts_into_boxes_of_fewer_dims_is_left_to_completion():
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    variables = jax.eval_shape(MODELS["axes"].init, jax.random.key(0), X)
    specs = sx.flax.specs(jax.eval_shape(tx.init, variables["params"]))
    assert specs.v_row["up"]["kernel"] is None
    assert specs.v["up"]["kernel"] is None
    assert sx.flax.specs(variables)["params"]["up"]["kernel"] == P(None, "model")


def test_without_rules():
    shapes = jax.eval_shape(MODELS["logical"].init, jax.random.key(0), X)
    with pytest.raises(
        ValueError, match=r"named \('hidden', 'outputs'\), and there are no rules.*specs\(tree, rules\)"
    ):
        sx.flax.specs(shapes)


def test_named_shardings_of_another_kind():
    mesh = make_mesh(MESH)
    box = nn.Partitioned(
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
        names=("model", None),
    )
    assert sx.flax.specs({"w": box})["w"].spec == P("data")


def test_boxes_of_shardings_for_what_is_not_boxed():
    """They are boxes of the tree, which has none there; names alone are given for both."""
    boxes = {"w": nn.Partitioned(P("model"), names=("model", None))}
    step = sx.shard_jit(lambda params: params, mesh=make_mesh(MESH), in_shardings=(boxes,))
    with pytest.raises(ValueError) as caught:
        step({"w": X})
    text = str(caught.value)
    assert text.startswith(
        "the tree in_shardings is no prefix of the tuple of positional arguments that are "
    )
    assert "in_shardings[0]['w']" in text and "Partitioned" in text


def test_what_is_no_sharding_in_a_box():
    boxes = {"w": nn.Partitioned({"u": P("model"), "v": "model"}, names=("model", None))}
    params = {"w": nn.Partitioned({"u": X, "v": X}, names=("model", None))}
    with pytest.raises(ValueError) as caught:
        sx.shard_jit(lambda params: params, mesh=make_mesh(MESH), in_shardings=(boxes,))(params)
    assert "argument params['w'].value['v']: 'model' is no sharding; give a PartitionSpec" in str(
        caught.value
    )

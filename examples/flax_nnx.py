"""A convolutional network in Flax nnx with batch norm, dropout, an optimizer and metrics, each changed in
place.

    python -m examples.flax_nnx

The decorator is all that a mesh changes; the sharding of a parameter stands with its initializer, as nnx has
it.
Shape suffixes: B batch, H W image, C channels.
"""

import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardax.flax
from examples.run import main

SIDE, CHANNELS, CLASSES, BATCH = 9, (7, 10), 5, 10


def split_over(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        first, second = CHANNELS
        self.conv1 = nnx.Conv(3, first, (3, 3), kernel_init=split_over(None, None, None, "model"), rngs=rngs)
        self.norm = nnx.BatchNorm(first, rngs=rngs)
        self.conv2 = nnx.Conv(
            first, second, (3, 3), kernel_init=split_over(None, None, "model", None), rngs=rngs
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(second, CLASSES, rngs=rngs)

    def __call__(self, x_BHWC):
        x_BHWC = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x_BHWC))), (2, 2), strides=(2, 2))
        x_BC = nnx.relu(self.conv2(x_BHWC)).mean((1, 2))
        return self.out(self.dropout(x_BC))


def create():
    model = ConvNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-4), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy())


def train_step(model, optimizer, metrics, batch):
    x_BHWC, labels_B = batch

    def loss(model):
        logits_BC = model(x_BHWC)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BC, labels_B).mean(), logits_BC

    (value, logits_BC), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=value, values=value, logits=logits_BC, labels=labels_B)
    return value


def batches(steps: int):
    """Images of a class's color in noise."""
    rng = np.random.default_rng(0)
    colors = rng.normal(size=(CLASSES, 1, 1, 3))
    for _ in range(steps):
        labels_B = rng.integers(0, CLASSES, BATCH)
        x_BHWC = colors[labels_B] + 0.5 * rng.normal(size=(BATCH, SIDE, SIDE, 3))
        yield x_BHWC.astype(np.float32), labels_B.astype(np.int32)


def train(mesh, steps: int = 20) -> list[float]:
    """The losses; on one device, under plain `nnx.jit`, where there is no mesh."""
    if mesh is None:
        with nnx.use_eager_sharding(False):
            return run(nnx.jit(create), nnx.jit(train_step), steps)
    return run(shardax.flax.shard_jit(create, mesh=mesh), step_on(mesh), steps)


def step_on(mesh):
    return shardax.flax.shard_jit(
        train_step, mesh=mesh, in_shardings=(None, None, None, P("data")), donate_argnums=(0, 1, 2)
    )


def plan(mesh):
    with nnx.use_eager_sharding(False):
        return step_on(mesh).plan(*nnx.eval_shape(create), next(batches(1)))


def run(create, step, steps: int) -> list[float]:
    model, optimizer, metrics = create()
    return [float(step(model, optimizer, metrics, batch)) for batch in batches(steps)]


if __name__ == "__main__":
    main(train)

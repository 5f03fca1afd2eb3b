"""A collective that settles a sum serves the line of the newest contribution to it, and names the older
ones.
"""

import functools
import inspect
import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from docs.programs import BATCH, PARAMS, SPECS, loss
from examples import equinox_cnn, flax_nnx
from models import gpt2
from models.gpt2_sharding import param_specs
from shardax.ledger.lines import code
from tests.ledger_programs import floats

pytestmark = pytest.mark.mixed_dtypes


def abstract(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def added(x, u, v):
    first = x @ u
    second = x @ v
    return first + second


def chained(x, u, v):
    first = x @ u
    second = first + x @ v
    third = second + x @ (u + v)
    return third * 2


def annotated(x, u, v):
    first = sx.annotate(x @ u, P(None, None))
    second = x @ v
    return first + second


def settled_before(x, u, v):
    first = jnp.sin(x @ u)
    second = x @ v
    return first + second


def looped(x, u, v):
    first = x @ u
    return lax.fori_loop(0, 3, lambda i, c: c + x @ v, first)


def branched(x, u, v):
    first = x @ u
    second = x @ v
    return lax.cond(x[0, 0] > 0, lambda a, b: a + b, lambda a, b: a - b, first, second)


def barred(x, u, v):
    first = x @ u
    second = x @ v
    return lax.optimization_barrier((first, second))


# function: of each sum of products the variable that its line assigns, then those of the older contributions
SUMS = {
    added: [["second", "first"]],
    chained: [["third", "second", "first"]],
    annotated: [["first"], ["second"]],
    settled_before: [["first"], ["second"]],
    branched: [["second", "first"]],
    barred: [["first"], ["second"]],
    looped: [["return lax.fori_loop(0, 3, lambda i, c: c + x @ v, first)", "first"]],
}


def plan_of(f):
    specs = P(None, "model"), P("model"), P("model")
    args = floats(8, 1024), floats(1024, 512), floats(1024, 512)
    return sx.shard_jit(f, mesh=abstract(model=4), in_shardings=specs).plan(*args)


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
def test_newest_contribution_and_the_older_ones(f):
    sums = [c for c in plan_of(f).collectives if c.reason == "sum of dot_general"]
    assert sorted([code(line).split(" = ")[0] for line in (c.line, *c.also)] for c in sums) == SUMS[f]


def test_texts():
    plan = plan_of(chained)
    (c,) = plan.collectives
    _, start = inspect.getsourcelines(chained)
    *_, also = plan.because(c).partition("; ")
    assert also == f"also test_owed.py:{start + 2} and test_owed.py:{start + 1}"
    assert f"split by x and v; {also}" in " ".join(plan.text().split())
    (entry,) = json.loads(plan.to_json())["collectives"]
    assert entry["also"] == [f"{__file__}:{start + 2}", f"{__file__}:{start + 1}"]


def test_values_of_one_line_by_annotations_of_their_own():
    def f(x, w):
        return jnp.sin(x) + 1.0, jnp.sin(w) + 1.0

    args = floats(8, 8), floats(8, 8)
    plan = sx.shard_jit(f, mesh=abstract(data=2, model=4), in_shardings=(P("data"), P("data"))).plan(*args)
    text = " ".join(plan.text().split())
    assert "P('data') by x 2 f32[8,8]" in text and "P('data') by w 2 f32[8,8]" in text


def test_values_are_shown_as_they_are_made():
    """Completion proposes what the annotations lead to; what is small is computed by every device."""
    step = sx.shard_jit(jax.value_and_grad(loss), mesh=abstract(data=4, model=2), in_shardings=SPECS)
    plan = step.plan(PARAMS, BATCH)
    assert "replicated, chosen over P('data')  by x_BM" in plan.text()
    made = {(x["primitive"], x["array"], x["sharding"]) for x in json.loads(plan.to_json())["values"]}
    assert ("sub", "f32[32,64]", "P(None, None)") in made
    assert not any(sharding == "P('data', None)" for *_, sharding in made)


@pytest.mark.promotes_ranks
def test_gpt2():
    """Of each layer what attention and the feed-forward give out; and the embedding. One group of 128
    devices: with more, these would share the work on each weight, and send for that too.
    """
    config = replace(gpt2.SIZES["gpt2"], vocab=50304, heads=128, model=1024)
    mesh = abstract(data=1, model=128)
    params = jax.eval_shape(functools.partial(gpt2.init_params, config), jax.random.key(0))
    specs = param_specs(params, mesh.axis_names), P("data")
    forward = sx.shard_jit(functools.partial(gpt2.logits, config), mesh=mesh, in_shardings=specs)
    plan = forward.plan(params, jax.ShapeDtypeStruct((1, 1), "int32"))
    assert all(c.kind == "all_reduce" and not c.also for c in plan.collectives)
    assert Counter(code(c.line) for c in plan.collectives) == {
        "x_BSM = embed(tokens_BS) + position_SM[: tokens_BS.shape[1]].astype(c.dtype)": 1,
        "return out(y_BSND)": 12,
        'return nn.Dense(c.model, dtype=c.dtype, kernel_init=residual(c), name="down")(y_BSH)': 12,
    }


@pytest.mark.parametrize(
    "example, lines",
    [
        (
            flax_nnx,
            {
                "x_BHWC = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x_BHWC))), (2, 2), strides=(2, 2))": 8,
                "x_BC = nnx.relu(self.conv2(x_BHWC)).mean((1, 2))": 2,
                "return optax.softmax_cross_entropy_with_integer_labels(logits_BC, labels_B).mean(), "
                "logits_BC": 1,
            },
        ),
        (
            equinox_cnn,
            {
                "x = layer(x)": 1,
                "return -jnp.take_along_axis(predicted, labels[:, None], axis=1).mean()": 1,
            },
        ),
    ],
    ids=["flax nnx", "Equinox"],
)
def test_examples(example, lines):
    """Batch norm's two sums and the gradients of its scale and bias; the batch that is brought together."""
    plan = example.plan(abstract(data=2, model=4))
    parts = [part for c in plan.collectives for part in c.parts]
    assert all(c.line.startswith(example.__file__) and not c.also for c in parts)
    assert Counter(code(c.line) for c in parts) == lines

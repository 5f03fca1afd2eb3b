"""What the main job's default step sends (two million parameters, mesh data=4, model=2): listed here, and nothing else is sent.

Counted from the StableHLO that JAX lowers, not from our own plan, and equal to the plan.
"""

import math
from collections import Counter
from functools import cache

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2
from models.devices import make_mesh
from models.gpt2_sharding import BATCH, param_specs
from models.job import make_job
from models.options import parse
from models.rules import on_axes
from models.steps import State
from shardax.explain import hlo

# flax and optax mix weakly typed floats with integer counts
pytestmark = pytest.mark.mixed_dtypes

DATA, MODEL = 4, 2
BOTH = DATA * MODEL  # devices that exchange: the axes of a collective


@cache
def default_step():
    """The mesh, the parameters' shapes, and the default step's plan and lowered form."""
    mesh = make_mesh({"data": DATA, "model": MODEL})
    job = make_job(parse([]))
    specs = (State(param_specs(job.state.params, mesh.axis_names), None, None), on_axes(BATCH, mesh.axis_names))
    step = sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0)
    return mesh, job.state.params, step.plan(job.state, job.batch), step.lower(job.state, job.batch)


def expected() -> Counter:
    """How often each (kind, devices, shape on each device) runs in a step."""
    options, config = parse([]), gpt2.SIZES["default"]
    layers, vocab, width = config.layers, config.vocab, config.model
    tokens = (options.batch // DATA, options.seq)
    x = (*tokens, width)
    block = math.ceil(vocab / MODEL)  # 129: the uneven embedding's rows inside, where `model` splits them
    table = [
        # kind         devices  shape                   times       what for
        ("all_reduce", MODEL, x, 2 * layers),  # Megatron, forward: attention's and the feed-forward's outputs
        ("all_reduce", MODEL, x, 2 * layers),  # Megatron, backward: the gradients of their inputs
        ("all_gather", MODEL, (vocab, width // MODEL), 1),  # vocabulary, forward: fewer rows than a device has tokens
        ("all_reduce", MODEL, tokens, 1),  # vocabulary, forward: the softmax's maximum
        ("all_reduce", MODEL, tokens, 1),  # vocabulary, forward: the softmax's sum
        ("all_reduce", MODEL, x, 1),  # vocabulary, backward: the gradient of the logits' input
        ("all_reduce", BOTH, (), 1),  # the loss: the mean over `data`, the label's logit over `model`
        ("all_reduce", MODEL, (), 1),  # clipping: the norm of all gradients
        ("all_to_all", MODEL, (block * MODEL, width // MODEL), 1),  # at rest: the embedding on the way in
        ("all_to_all", MODEL, (block, width), 1),  # at rest: its gradient
        *[("all_reduce", DATA, shape, 1) for shape in gradients()],  # each parameter's gradient, once
    ]
    total = Counter()
    for *what, times in table:
        total[tuple(what)] += times
    return total


def gradients() -> list[tuple[int, ...]]:
    """The shape of each parameter's gradient on each device: it lies as the parameter rests."""
    mesh, params, _, _ = default_step()
    specs = param_specs(params, mesh.axis_names)
    assert specs["embed"]["embedding"] == P("model", None)
    specs["embed"]["embedding"] = P(None, "model")  # MODEL does not divide 257
    shapes = jax.tree.map(lambda spec, leaf: NamedSharding(mesh, spec).shard_shape(leaf.shape), specs, params)
    return jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_it_sends_what_is_listed_and_nothing_else():
    lowered = default_step()[3]
    found, dtypes = Counter(), Counter()
    for c in hlo.lowered(lowered.compiler_ir()):
        for operand in c.operands:
            found[c.kind, c.devices, operand.shape] += c.trips
            dtypes[operand.dtype.name] += c.trips
    assert dtypes == {"float32": sum(found.values()) - 1, "int32": 1}  # the maximum: as integers, which no backend mistakes
    assert found == expected()


def test_the_plan_says_the_same():
    _, _, plan, lowered = default_step()
    assert hlo.counts(plan.collectives) == hlo.counts(hlo.lowered(lowered.compiler_ir()))
    axes = {(c.devices, c.axes) for c in plan.collectives}
    assert axes == {(DATA, ("data",)), (MODEL, ("model",)), (BOTH, ("data", "model"))}


def test_gradients_over_data_are_as_many_bytes_as_parameters():
    _, params, plan, _ = default_step()
    reduced = [c for c in plan.collectives if c.axes == ("data",)]
    assert len(reduced) == len(jax.tree.leaves(params))
    held = sum(4 * math.prod(shape) for shape in gradients())
    assert sum(c.nbytes for c in reduced) == held * 2 * (DATA - 1) // DATA


def test_what_the_uneven_embedding_costs_is_in_the_plan():
    (moved,) = default_step()[2].at_rest
    assert (moved.shape, str(moved.wanted), str(moved.rests)) == ((257, 192), "P('model', None)", "P(None, 'model')")
    each = math.ceil(257 / MODEL) * 192 * 4 // MODEL
    assert default_step()[2].cost_at_rest(moved) == each

"""What the main job's default step sends (two million parameters, mesh data=4, model=2): listed here, and
nothing else is sent.

Counted from the StableHLO that JAX lowers, not from our own plan, and equal to the plan.
"""

from collections import Counter
from functools import cache

import pytest

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
pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

DATA, MODEL = 4, 2
BOTH = DATA * MODEL  # devices that exchange: the axes of a collective


@cache
def default_step():
    """The mesh, the parameters' shapes, and the default step's plan and lowered form."""
    mesh = make_mesh({"data": DATA, "model": MODEL})
    job = make_job(parse([]))
    specs = (
        State(param_specs(job.state.params, mesh.axis_names), None, None),
        on_axes(BATCH, mesh.axis_names),
    )
    step = sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0)
    return mesh, job.state.params, step.plan(job.state, job.batch), step.lower(job.state, job.batch)


def expected(first: str) -> Counter:
    """How often each (kind, devices, shape on each device) runs in a step, whose first layer is split by `first`."""
    options, config = parse([]), gpt2.SIZES["default"]
    layers, vocab, width, head = config.layers, config.vocab, config.model, config.model // config.heads
    batch, seq, heads = options.batch // DATA, options.seq, config.heads // MODEL
    later, part, whole = layers - 1, (batch // MODEL, seq, width), (batch, seq, width)
    table = [
        # kind             devices  shape                   times       what for
        # What sums owe over `model` is scattered by rows of the batch. Feed-forward gathers these, there and back.
        ("all_gather", MODEL, part, 2 * layers - 1),  # not in the first layer, forward
        ("reduce_scatter", MODEL, whole, 2 * layers),
        # Attention is computed by rows, with whole weights: these are smaller than its activations.
        ("all_gather", MODEL, (width, 3, heads, head), later),
        ("all_gather", MODEL, (1, 1, 3, heads, head), later),
        ("all_gather", MODEL, (heads, head, width), layers),
        # That of the first layer by heads.
        ("reduce_scatter", MODEL, whole, 1),
        # Embedding: fewer rows of the vocabulary than a device has tokens.
        ("all_gather", MODEL, (vocab, width // MODEL), 1),
        ("all_reduce", BOTH, (), 2),  # the loss, and the norm of all gradients for clipping
        *gradients(),
        *FIRST[first](batch, seq, vocab, width, config.heads, head),
    ]
    total = Counter()
    for *what, times in table:
        total[tuple(what)] += times
    return total


def by_positions(batch, seq, vocab, width, heads, head) -> list[tuple]:
    """The embedding comes split by features, and moves to positions."""
    return [
        ("all_gather", MODEL, (batch, seq // MODEL), 2),  # the two normalizations
        ("all_gather", MODEL, (batch, seq // MODEL, 1), 2),
        ("all_gather", MODEL, (batch, seq, heads // MODEL, head), 1),  # what the projection reads
        ("all_to_all", MODEL, (batch, seq // MODEL, heads, head), 1),  # its gradient, back
        # gradients
        ("reduce_scatter", BOTH, (width, heads, head), 1),
        ("all_gather", DATA, (heads // BOTH, head, width), 1),
        ("reduce_scatter", BOTH, (vocab, width), 1),
        ("reduce_scatter", DATA, (seq // MODEL, width), 1),
        ("all_gather", BOTH, (seq // BOTH, width), 1),
        ("all_reduce", BOTH, (width,), 2),  # of the first norm
    ]


def by_features(batch, seq, vocab, width, heads, head) -> list[tuple]:
    """It is normalized as it comes."""
    return [
        ("all_reduce", MODEL, (batch, seq), 3),  # the first normalization, there and back
        ("all_reduce", MODEL, (batch, seq, 1), 1),
        ("all_gather", MODEL, (batch // MODEL, seq, width), 2),  # the feed-forward part, and a gradient
        ("all_to_all", MODEL, (batch, seq, heads // MODEL, head), 1),  # from heads to rows
        # gradients
        ("reduce_scatter", DATA, (width, heads // MODEL, head), 1),
        ("all_gather", DATA, (heads // MODEL, head // DATA, width), 1),
        ("reduce_scatter", DATA, (vocab, width // MODEL), 1),
        ("reduce_scatter", MODEL, (vocab, width), 1),  # what the logits add
        ("reduce_scatter", DATA, (seq, width // MODEL), 1),
        ("all_gather", BOTH, (seq, width // BOTH), 1),
        ("reduce_scatter", DATA, (width // MODEL,), 2),  # of the first norm
        ("all_gather", BOTH, (width // BOTH,), 2),
    ]


FIRST = {"positions": by_positions, "features": by_features}
"""JAX 0.10 writes a normalization with more operations than the newest, and the first layer is split otherwise."""


def gradients() -> list[tuple]:
    """The large ones are scattered over `data`, or both, where AdamW updates a part of each parameter; what is
    new is gathered over `data`. (The optimizer's state rests as parameters do, so its parts are cut out.)"""
    config = gpt2.SIZES["default"]
    layers, vocab, width, head = config.layers, config.vocab, config.model, config.model // config.heads
    heads, hidden = config.heads // MODEL, config.hidden // MODEL
    later = layers - 1
    return [
        ("reduce_scatter", BOTH, (3, config.heads, head, width), later),
        ("reduce_scatter", BOTH, (3, config.heads, head), later),
        ("reduce_scatter", BOTH, (width, config.heads, head), later),
        ("all_gather", DATA, (width, 3, heads // DATA, head), later),
        ("all_gather", DATA, (3, heads // DATA, head), later),
        ("all_gather", DATA, (heads // DATA, head, width), later),
        ("reduce_scatter", DATA, (3, heads, head, width), 1),
        ("all_reduce", DATA, (3, heads, head), 1),
        ("all_gather", DATA, (width, 3, heads, head // DATA), 1),
        ("reduce_scatter", DATA, (width, hidden), layers),
        ("all_gather", DATA, (width // DATA, hidden), layers),
        ("reduce_scatter", DATA, (hidden, width), layers),
        ("all_gather", DATA, (hidden, width // DATA), layers),
        ("all_gather", DATA, (vocab, width // BOTH), 1),
        ("all_reduce", BOTH, (width,), 6 * layers),  # of norms and biases
        ("all_reduce", DATA, (hidden,), layers),
    ]


def test_it_sends_what_is_listed_and_nothing_else():
    lowered = default_step()[3]
    found, dtypes = Counter(), Counter()
    for c in hlo.lowered(lowered.compiler_ir()):
        for operand in c.operands:
            found[c.kind, c.devices, operand.shape] += c.trips
            dtypes[operand.dtype.name] += c.trips
    assert dtypes == {"float32": sum(found.values())}
    assert found in [expected(first) for first in FIRST]


def test_the_plan_says_the_same():
    _, _, plan, lowered = default_step()
    assert hlo.counts(plan.collectives) == hlo.counts(hlo.lowered(lowered.compiler_ir()))
    axes = {(c.devices, tuple(sorted(c.axes))) for c in plan.collectives}
    assert axes == {(DATA, ("data",)), (MODEL, ("model",)), (BOTH, ("data", "model"))}


def test_it_sends_less_than_megatron():
    """Two reductions of activations in each layer there and back, and one of each gradient, send 12.0 MiB."""
    assert default_step()[2].comm_bytes < 11 * 2**20  # 10.8 MiB: one that sends 10.7 takes .2 % longer


def test_what_the_uneven_embedding_costs_is_in_the_plan():
    (moved,) = default_step()[2].at_rest
    assert (moved.shape, str(moved.requested), str(moved.stored)) == (
        (257, 192),
        "P('model', None)",
        "P(None, 'model')",
    )
    assert default_step()[2].cost_at_rest(moved) == 0  # it is read as it rests

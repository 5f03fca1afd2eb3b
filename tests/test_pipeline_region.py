"""A step's program of one microbatch on stages: which parts, which values, which way; without devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax import _jax
from shardax.pipeline import slots
from shardax.pipeline.apart import apart
from shardax.pipeline.assign import BACKWARD, FORWARD, Assignment
from shardax.pipeline.cut import Part, merged
from shardax.pipeline.flow import Flow
from shardax.pipeline.outside import outside
from shardax.pipeline.passes import Outputs, Pass, Passes, Program, accumulated
from shardax.pipeline.region import Region
from tests.numpy_programs import evaluate

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype=np.dtype("float32"))
I32 = jax.ShapeDtypeStruct((), "int32")
B, M, L = 6, 3, 4


def loss(params, x_BM, number):
    """Tied ends, a mask that is made of the number alone."""
    keep_B = lax.iota("int32", B) < number
    h_BM, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_BM @ params["in"], params["layers"])
    return jnp.where(keep_B[:, None], h_BM @ params["in"].T, 0.0).sum()


def step(ends, layers, x_BM, number):
    value, grads = jax.value_and_grad(loss)({"in": ends, "layers": layers}, x_BM, number)
    return value, grads["in"], grads["layers"]


TYPES = F32((M, M)), F32((L, M, M)), F32((B, M)), I32


def made():
    return jax.make_jaxpr(step)(*TYPES)


def flow_of(closed=None) -> Flow:
    return Flow(closed or made(), 2, 1)


def values():
    random = np.random.RandomState(0)
    return [random.randn(*t.shape).astype("float32") for t in TYPES[:3]] + [np.int32(4)]


def names(flow, parts):
    return [(flow.jaxpr.eqns[part.number].primitive.name, part.start, part.stop) for part in parts]


def close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# apart


def scans(closed):
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]


def dots(eqn) -> int:
    return sum(inner.primitive.name == "dot_general" for inner in eqn.params["jaxpr"].jaxpr.eqns)


def test_apart_makes_two_scans_of_the_backward_one():
    """The cotangent's product in one, the gradient's in the other, and none twice."""
    assert [dots(eqn) for eqn in scans(made())] == [1, 2]
    found = scans(apart(made()))
    assert [(dots(eqn), _jax.scan_counts(eqn.params)[1], eqn.params["reverse"]) for eqn in found] == [
        (1, 1, False),
        (1, 1, True),
        (1, 0, True),
    ]


def test_apart_computes_the_same():
    close(evaluate(apart(made()), values()), evaluate(made(), values()))


def test_apart_leaves_scans_without_late_products_as_they_are():
    """Of a forward pass, and of a backward pass whose gradients are no products."""

    def elementwise(w_LM, x_M):
        return lax.scan(lambda h, w: (h * w, None), x_M, w_LM)[0].sum()

    forward = jax.make_jaxpr(lambda *a: loss({"in": a[0], "layers": a[1]}, *a[2:]))(*TYPES)
    backward = jax.make_jaxpr(jax.grad(elementwise))(F32((L, M)), F32((M,)))
    assert str(apart(forward)) == str(forward)
    assert str(apart(backward)) == str(backward)


# flow


def test_flow_parts_the_forward_from_the_backward_pass():
    """What is made of the mask alone is no part of either, nor is what is made of parameters alone."""
    flow = flow_of()
    trips = [("scan", trip, trip + 1) for trip in range(L)]
    ends = [("dot_general", 0, 1), ("select_n", 0, 1), ("reduce_sum", 0, 1)]
    assert names(flow, flow.parts) == [("dot_general", 0, 1), *trips, *ends]
    scanned = [part for part in names(flow, flow.returning) if part[0] == "scan"]
    assert scanned == trips
    assert not {name for name, *_ in names(flow, flow.parts + flow.returning)} & {"iota", "lt"}


def test_flow_reads_rows_of_what_trips_stacked():
    """The second trip of the backward scan reads the last row but one of it, and of the layers."""
    flow = flow_of()
    (number,) = {p.number for p in flow.returning if flow.jaxpr.eqns[p.number].primitive.name == "scan"}
    part = Part(number, 1, 2)
    operands = list(flow.operands(part))
    assert operands[0].key == ("carry", number, 0, 0, 1) and operands[0].rows is None
    assert {operand.rows for operand in operands[1:]} == {(2, 3)}
    assert all(flow.is_stacked(operand.key) for operand in operands[1:])
    assert [rows for _, rows in flow.pieces([part])] == [(2, 3)]
    assert flow.writes(part) == [("carry", number, 0, 0, 2), ("rows", number, 1, 2, 3)]


def test_flow_reads_what_only_moves_as_what_it_is_made_of():
    """The transposed matrix at the end is that of the start, so that one piece is sent and kept."""
    flow = flow_of()
    first, last = flow.parts[0], next(p for p in flow.parts if p.number > flow.parts[L].number)
    assert flow.pieces([first]) == flow.pieces([last]) == [(flow.of_params[0], None)]


@pytest.mark.parametrize("at", [[], [1], [3], [2, 5]])
def test_flow_runs_in_any_stretches(at):
    """All parts one after the other, in stretches of trips, as the program runs them."""
    flow = flow_of()
    bounds = [0, *at, len(flow.parts)]
    stretches = [merged(flow.parts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]

    def run(ends, layers, x, number):
        env = dict(zip((*flow.of_params, *flow.of_batch, *flow.rest), (ends, layers, x, number), strict=True))
        for parts in (*stretches, merged(flow.returning[:6]), merged(flow.returning[6:])):
            reader = flow.run(parts, env, {})
        return [reader.value(v) for v in flow.jaxpr.outvars]

    close(evaluate(jax.make_jaxpr(run)(*TYPES), values()), evaluate(made(), values()))


# assign


def assigned(places, closed=None) -> Assignment:
    return Assignment.of(flow_of(closed), places)


def test_backward_trips_run_where_their_layers_ran():
    found = assigned([3])  # after two layers
    forward, backward = (
        [[p[1:] for p in names(found.flow, parts) if p[0] == "scan"] for parts in side]
        for side in (found.forward, found.backward)
    )
    assert forward == [[(0, 2)], [(2, 4)]]
    assert backward == [[(2, 4)], [(0, 2)]]


@pytest.mark.parametrize("places", [[3], [1, 5], [2, 3, 4], [1, 2, 3, 4, 5, 6]])
def test_each_part_runs_once_and_reads_what_has_come(places):
    """A value moves up on the forward pass, stays for the backward pass, and moves down on that."""
    found = assigned(places)
    ways, flow = found.ways, found.flow
    for parts, all_parts in ((found.forward, flow.parts), (found.backward, flow.returning)):
        counted = [Part(p.number, t, t + 1) for some in parts for p in some for t in range(p.start, p.stop)]
        assert sorted(counted) == sorted(all_parts)
    for k in range(found.stages):
        made_here = {key for key, (name, at) in found.made.items() if (name, at) == (FORWARD, k)}
        assert set(found.reads(found.forward[k])) <= made_here | set(ways.received[k])
        assert set(ways.kept[k]) <= made_here | set(ways.received[k])
        below = set() if k == found.stages - 1 else set(ways.returned[k + 1])
        own = {key for key, (name, at) in found.made.items() if (name, at) == (BACKWARD, k)}
        assert set(found.reads(found.backward[k])) <= set(ways.kept[k]) | below | own
        assert set(ways.returned[k]) <= own | below | made_here | set(ways.received[k])
    assert not ways.received[0] and not ways.returned[0]


def test_only_a_carry_and_a_cotangent_cross_between_layers():
    """Beside the gradient of the tied matrix, that both ends add to."""
    found = assigned([3])
    (carry,) = found.ways.received[1]
    assert carry == ("carry", found.flow.parts[1].number, 0, 0, 2)
    shapes = [found.flow.type_of(key).shape for key in found.ways.returned[1]]
    assert sorted(shapes) == [(M, M), (B, M)]


def test_b_does_what_the_stage_before_waits_for():
    """The gradients of weights, where they are apart, are left to W."""
    found = assigned([3], apart(made()))
    of_inputs, of_weights = found.split(1)
    assert [p for p in names(found.flow, of_weights) if p[0] == "scan"] == [("scan", 0, 2)]
    assert {n for n, *_ in names(found.flow, of_inputs)} >= {"scan", "dot_general"}
    assert sorted([*of_inputs, *of_weights]) == sorted(found.backward[1])
    assert found.split(0) == ([], list(found.backward[0]))  # nobody waits for the first stage


# region


def test_a_region_has_the_schedule_that_was_asked_for():
    region = Region(made(), 2, 1, 3)
    asked, _ = region.schedule("1f1b", 2, 4, None)
    assert (asked.name, asked.stages, asked.microbatches, asked.backward) == ("1f1b", 2, 4, True)
    alone = Region(jax.make_jaxpr(lambda *a: step(*a)[0])(*TYPES), 2, 1, 1)
    assert not alone.schedule("gpipe", 2, 4, None)[0].backward
    chosen, told = region.schedule("auto", 2, 4, None)
    assert f"-> {chosen.name} " in told
    assert chosen.virtual_stages == 2 and chosen.bubble <= asked.bubble


@pytest.mark.parametrize("schedule", ["forward", "F0 F1\nF0 F1", lambda p, m, v: "F0 F1\n" * p])
def test_gradients_want_a_schedule_with_backward_passes(schedule):
    """Without, they would be zeros, and the loss that of nobody."""
    alone = Region(jax.make_jaxpr(lambda *a: step(*a)[0])(*TYPES), 2, 1, 1)
    assert not alone.schedule(schedule, 2, 2, None)[0].backward
    words = r"schedule of the step: .* has forward passes alone, .* expected B .* '1f1b', .*pipeline.apply"
    with pytest.raises(ValueError, match=words):
        Region(made(), 2, 1, 3).schedule(schedule, 2, 2, None)


# passes


def test_gradients_are_the_sums_with_dims():
    """Of all kinds of instructions of a stage, each once, scalars excepted."""
    both = {slots.FORWARD: Pass(Outputs, sums=(0, 2)), slots.BACKWARD: Pass(Outputs, sums=(2, 1))}
    stages = (Passes(both, (), (), ()), Passes({slots.FORWARD: Pass(Outputs, sums=(0,))}, (), (), ()))
    program = Program(stages, sums=(F32(()), F32((M,)), F32((M, M))), results=())
    assert [program.gradients(k) for k in range(2)] == [(1, 2), ()]


@pytest.mark.parametrize(
    "dtype, wanted",
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("int8", "int8")],
)
def test_narrow_floats_are_added_up_in_wider_ones(dtype, wanted):
    assert jnp.dtype(accumulated(jax.ShapeDtypeStruct((3,), dtype))) == wanted


def test_what_is_outside_is_no_part_of_the_stages():
    """Neither what stands in front, nor its backward pass: of both stages, tanh and products of layers alone."""

    def front(ends, x_BM):
        return jnp.sin(x_BM @ ends)

    def step(ends, layers, x_BM, number):
        def loss(ends, layers):
            x = outside(front)(ends, x_BM)
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0].sum()

        return jax.value_and_grad(loss, (0, 1))(ends, layers)

    value_and_grads = jax.make_jaxpr(lambda *args: jax.tree.leaves(step(*args)))(*TYPES)
    region = Region(value_and_grads, 2, 1, 3)
    found = region.outside
    assert found is not None and region.staged.sums == 2
    assert [v.aval.shape for v in (*found.entering, *found.leaving)] == [(B, M)] * 2
    of_stages = {e.primitive.name for e in found.closed.jaxpr.eqns}
    assert "scan" in of_stages and not of_stages & {"sin", "cos", "dot_general"}
    assert [found.joined("ab", "c", 0, 3)] == [["a", "c", "b"]]

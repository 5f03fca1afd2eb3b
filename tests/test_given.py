"""What is of the wrong kind, anywhere in the public surface: the message names the argument, what it is, and
what to give.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import check_rule, compare, missing_claims, ramp
from shardax.testing import assert_max_bytes, assert_no_collectives, assert_plan
from tests.test_errors import MESH, W, identity, message

STEP = sx.shard_jit(lambda state, x: (state["w"] * x).sum(), mesh=MESH, in_shardings=(None, P("x")))
ARGS = ({"w": W}, W)
PLAN = STEP.plan(*ARGS)


def shard_jit(**given):
    return sx.shard_jit(identity, mesh=MESH, **given)


def inside(f):
    return sx.shard_jit(f, mesh=MESH)(W)


def register(**given):
    sx.register_rule(**{"primitive": "none_such", "rule": "... -> ...", **given})


def of_two():
    return jax.make_jaxpr(lambda x, y: x + y)(W, np.float32(1))


RANK = [sx.Replicate(), sx.Replicate()]
CALLS = {  # what the message begins with, or has: a call that is given what is wrong
    "what of Plan.why is": PLAN.why,
    "threshold of Plan.memory is": PLAN.memory,
    "chip of Plan.estimate is": PLAN.estimate,
    "collective of Plan.because is": PLAN.because,
    "other of Plan.diff is": PLAN.diff,
    "path of Plan.to_html is": PLAN.to_html,
    "width of Plan.text is": PLAN.text,
    "lines of Plan.summary is": PLAN.summary,
    "value of Plan.sharding is": PLAN.sharding,
    "entry of Plan.cost_at_rest is": PLAN.cost_at_rest,
    "Options(strict=": lambda x: sx.Options(strict=x),
    "Options(max_gather_bytes=": lambda x: sx.Options(max_gather_bytes=x),
    "Options(allow=": lambda x: sx.Options(allow=x),
    "static_argnums of shard_jit is": lambda x: shard_jit(static_argnums=x),
    "static_argnames of shard_jit is": lambda x: shard_jit(static_argnames=x),
    "donate_argnums of shard_jit is": lambda x: shard_jit(donate_argnums=x),
    "donate_argnames of shard_jit is": lambda x: shard_jit(donate_argnames=x),
    "the result of transforms[1] of shard_jit is": lambda x: shard_jit(transforms=(lambda j: j, lambda j: x))(W),
    "annotate's ['a'] is": lambda x: sx.annotate({"a": x}, NamedSharding(MESH, P())),
    "annotate's value is": lambda x: inside(lambda _: sx.annotate(x, P())),
    "annotate's value: ": lambda x: sx.annotate(W, x),
    "x of split is": lambda x: sx.split(x, 0, "x"),
    "dim of split is": lambda x: inside(lambda w: sx.split(w, x, "x")),
    "axis_or_count of split is": lambda x: inside(lambda w: sx.split(w, 0, x)),
    "x of shard is": lambda x: sx.shard(x, [[0, 1]]),
    "device_assignment of shard is": lambda x: inside(lambda w: sx.shard(w, x)),
    "x of mesh_split is": lambda x: sx.mesh_split(x, MESH, [0]),
    "mesh of mesh_split is": lambda x: sx.mesh_split(W, x, [0, -1]),
    "dims_mapping of mesh_split is": lambda x: sx.mesh_split(W, MESH, x),
    "mesh_split(x, mesh, ": lambda x: sx.mesh_split(W, MESH, [x, -1]),
    "x of mark_sharding is": lambda x: sx.mark_sharding(x, MESH, ("x",)),
    "mesh of mark_sharding is": lambda x: sx.mark_sharding(W, x, ("x", None)),
    "spec of mark_sharding is": lambda x: sx.mark_sharding(W, MESH, x),
    "mark_sharding(x, mesh, ": lambda x: sx.mark_sharding(W, MESH, (x, None)),
    "x of redistribute is": lambda x: sx.redistribute(x, MESH, RANK),
    "mesh of redistribute is": lambda x: sx.redistribute(W, x, RANK),
    "placements of redistribute is": lambda x: sx.redistribute(W, MESH, x),
    "redistribute(x, mesh, ": lambda x: sx.redistribute(W, MESH, [x, sx.Replicate()]),
    "dim of Shard is": sx.Shard,
    "abstract_state: step is": lambda x: sx.abstract_state(x, *ARGS),
    "argnums of abstract_state is": lambda x: sx.abstract_state(STEP, *ARGS, argnums=x),
    "rule of partition_as is": sx.partition_as,
    "flops of partition_as is": lambda x: sx.partition_as("... -> ...", flops=x),
    "what partition_as('... -> ...') is given is": sx.partition_as("... -> ..."),
    "a result of partition_as": lambda x: inside(lambda w: sx.partition_as("... -> ...")(lambda w: x)(w)),
    "an operand of LINEAR is": sx.LINEAR,
    "an operand of MOVES is": sx.MOVES,
    "primitive of register_rule is": lambda x: register(primitive=x),
    "rule of register_rule is": lambda x: register(rule=x),
    "local of register_rule is": lambda x: register(local=x),
    "passes of register_rule is": lambda x: register(passes=x),
    "in_place of register_rule is": lambda x: register(in_place=x),
    "sends of register_rule is": lambda x: register(sends=x),
    "ways of register_rule is": lambda x: register(ways=x),
    "flops of register_rule is": lambda x: register(flops=x),
    "batch of register_rule is": lambda x: register(batch=x),
    "made_anywhere of register_rule is": lambda x: register(made_anywhere=x),
    "fuses of register_rule is": lambda x: register(fuses=x),
    "reads of register_rule is": lambda x: register(reads=x),
    "accumulates of register_rule is": lambda x: register(accumulates=x),
    "commutes of register_rule is": lambda x: register(commutes=x),
    "of_parts of register_rule is": lambda x: register(of_parts=x),
    "anew of register_rule is": lambda x: register(anew=x),
    "once of register_rule is": lambda x: register(once=x),
    "casts of register_rule is": lambda x: register(casts=x),
    "heavy of register_rule is": lambda x: register(heavy=x),
    "file of assert_plan is": lambda x: assert_plan(STEP, ARGS, x),
    "args of <lambda> is": lambda x: assert_plan(STEP, x, "plan.json"),
    "has no plan": lambda x: assert_plan(x, ARGS, "plan.json"),
    "kinds": lambda x: assert_no_collectives(STEP, ARGS, x),
    "nbytes of assert_max_bytes is": lambda x: assert_max_bytes(STEP, ARGS, x),
    "f of compare is": lambda x: compare(x, (W,)),
    "args": lambda x: compare(identity, x),
    "n of compare is": lambda x: compare(identity, (W,), n=x),
    "seed of compare is": lambda x: compare(identity, (W,), seed=x),
    "slack of compare is": lambda x: compare(identity, (W,), slack=x),
    "meshes of compare is": lambda x: compare(identity, (W,), x),
    "one of meshes of compare is": lambda x: compare(identity, (W,), [x]),
    "f of a check is": lambda x: check_rule(x, W),
    "argument 0 of a check is": lambda x: missing_claims(jnp.sin, x),
    "only of a check is": lambda x: missing_claims(jnp.sin, W, only=x),
    "axes of check_rule is": lambda x: check_rule(jnp.sin, W, axes=x),
    "the shape of ramp is": ramp,
    "dtype of ramp is": lambda x: ramp(3, dtype=x),
}  # fmt: skip
NOTHING = object()
WRONG = {"a string": "none such", "a number": 1.5, "a set": {NOTHING}, "an object": NOTHING, "an array": W}
RIGHT = {  # some of them are meant
    "what of Plan.why is": "a string", "chip of Plan.estimate is": "a string", "other of Plan.diff is": "a string",
    "path of Plan.to_html is": "a string", "file of assert_plan is": "a string", "primitive of register_rule is": "a string",
    "threshold of Plan.memory is": "a number", "nbytes of assert_max_bytes is": "a number",
    "slack of compare is": "a number", "only of a check is": "a string",
    "rule of partition_as is": "a string", "rule of register_rule is": "a string",
    "static_argnames of shard_jit is": "a string", "donate_argnames of shard_jit is": "a string",
    "axis_or_count of split is": "a string",
}  # fmt: skip
ARRAYS = ("annotate's", "x of", "a result of", "argument 0")  # they may be arrays and numbers


CONSTRUCTORS = (
    "Options(strict=",
    "Options(max_gather_bytes=",
    "Options(allow=",
    "dim of Shard is",
)  # show one frame


def words(call, given, frames: bool) -> str:
    if frames:
        return message(call, given)
    with pytest.raises(ValueError) as caught:
        call(given)
    return str(caught.value)


@pytest.mark.parametrize("kind", WRONG)
def test_of_the_wrong_kind(kind):
    """Each argument of everything public; None of them reaches the machinery, whose errors would say
    nothing.
    """
    for start, call in CALLS.items():
        whatever = kind in ("an array", "a number") and start.startswith(ARRAYS) and "value: " not in start
        if RIGHT.get(start) != kind and not whatever:
            text = words(call, WRONG[kind], frames=start not in CONSTRUCTORS)
            assert start in text, (start, text)
            assert ("give" in text or "must be" in text) and len(text) < 900, text


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: PLAN.why(3),
            "what of Plan.why is 3, of type int: give the path of an argument ('state/params/w'), a line "
            "('model.py:12'), or the name of a variable",
        ),
        (
            lambda: PLAN.memory("x"),
            "threshold of Plan.memory is 'x', of type str: give a number of bytes, such as 1 << 20",
        ),
        (
            lambda: shard_jit(transforms=(lambda jaxpr: jaxpr.eqns,))(W),
            "the result of transforms[0] of shard_jit is [], of type list: give a ClosedJaxpr, as that "
            "function gets one",
        ),
        (
            lambda: shard_jit(transforms=(lambda jaxpr: of_two(),))(W),
            "the result of transforms[0] of shard_jit has other inputs, f32[8,4], f32[], than the jaxpr "
            "that it was given, f32[8,4]: keep them",
        ),
        (
            lambda: compare(identity, (W,), [{"x": 2}, {"x": "2"}]),
            "one of meshes of compare is {'x': '2'}, of type dict: give meshes, or mappings of axis "
            "names to sizes, such as [{'x': 4, 'y': 2}]",
        ),
    ],
)
def test_texts(call, text):
    assert message(call) == text

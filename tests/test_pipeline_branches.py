"""What a stage runs in a tick: whoever reads kept rows reads them after they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardax.pipeline import slots
from shardax.pipeline.branches import Branches, Rings
from shardax.pipeline.passes import Outputs

pytestmark = pytest.mark.quick

ROW, WEIGHTS = (4, 3), (3, 3)


def outputs(kept, held, sums):
    """Of an instruction that sends nothing."""
    empty = {name: [] for name in Outputs._fields}
    return Outputs(**{**empty, "kept": [kept], "held": [held], "sums": list(sums)})


def nothing(sums):
    return outputs(jnp.zeros(ROW), jnp.zeros(ROW), sums)


def idle(rings, made):
    return made


def forward(rings, made):
    return made._replace(kept=[jnp.ones(ROW)])


def backward_inputs(rings, made):
    return made._replace(held=[jnp.sin(rings.kept[0][rings.slot])])


def backward_weights(rings, made):
    return made._replace(sums=[made.sums[0] + rings.held[0][rings.slot][0]])


KINDS = [-1, slots.FORWARD, slots.BACKWARD_INPUTS, slots.BACKWARD_WEIGHTS]


def made(together):
    """The jaxpr of a tick of which these are branches of one switch, and the others alone."""
    branches = Branches(
        [idle, forward, backward_inputs, backward_weights],
        KINDS,
        nothing,
        np.array([[0, 1], [2, 3]], np.int32),
        together,
        [True],
    )

    def tick(number, kept, held, total):
        rings = Rings([kept], [held], jnp.int32(0), jnp.int32(1), jnp.int32(1))
        result, after = branches.run(number, jnp.asarray(branches.taken)[number], [], rings, [total])
        return result.sums, after.kept, after.held

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, *ROW), (2, *ROW), ROW[1:])]
    return branches, jax.make_jaxpr(tick)(jax.ShapeDtypeStruct((), "int32"), *types).jaxpr


def test_the_switch_has_a_branch_for_each_that_is_together():
    branches, jaxpr = made([0, 1])
    assert branches.taken.tolist() == [0, 1, 0, 0]
    assert [len(e.params["branches"]) for e in jaxpr.eqns if e.primitive.name == "cond"] == [2, 2, 2]


def test_reads_come_after_writes():
    """B reads the kept rows as F's was written, W the held ones as B's was: their conds take the updated
    buffers, and none takes a buffer as it came in."""
    _, jaxpr = made([0, 1])
    conds = [(n, e) for n, e in enumerate(jaxpr.eqns) if e.primitive.name == "cond"][1:]
    writes = [next(e for e in jaxpr.eqns if v in e.outvars) for v in jaxpr.outvars[1:]]
    assert [len(e.outvars) for e in writes] == [1, 1] and len(conds) == 2
    _, kept, held, _ = jaxpr.invars
    for (n, cond), write, before in zip(conds, writes, (kept, held), strict=True):
        assert jaxpr.eqns.index(write) < n
        assert any(v is write.outvars[0] for v in cond.invars)
        assert not any(v is before for v in cond.invars)


def test_all_together_are_one_switch():
    _, jaxpr = made([0, 1, 2, 3])
    (switch,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert len(switch.params["branches"]) == 4

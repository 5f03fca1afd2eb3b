"""Updates at a place that is known, as padding: which are, and where they begin."""

import jax
import numpy as np
import pytest
from jax import lax

from shardax.graph.static_updates import as_padding, scatter_starts

pytestmark = pytest.mark.quick


def last(f, *args):
    return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(*a) if isinstance(a, tuple) else a for a in args)).eqns[
        -1
    ]


def written(operand, update, dtype="float32"):
    shapes = (operand, "float32"), (update, dtype)
    return last(lambda x, y: lax.dynamic_update_slice(x, y.astype(x.dtype), (0,) * len(operand)), *shapes)


def names(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def paddings(jaxpr):
    return [eqn.params["padding_config"] for eqn in jaxpr.eqns if eqn.primitive.name == "pad"]


def test_a_write_is_padding_and_a_choice():
    made = as_padding(written((8, 4), (3, 4)), [2, 0])
    assert paddings(made) == [((2, 3, 0), (0, 0, 0))]
    assert names(made)[-1] == "select_n"
    assert names(made).count("iota") == 1  # only the rows are written in part
    assert [v.aval.shape for v in made.jaxpr.outvars] == [(8, 4)]


def test_a_write_of_everything_has_nothing_to_choose():
    assert paddings(as_padding(written((8, 4), (8, 4)), [0, 0])) == [((0, 0, 0), (0, 0, 0))]


def added(starts=2):
    return last(lambda x, y: x.at[starts : starts + 3].add(y), ((8, 4), "float32"), ((3, 4), "float32"))


def test_an_addition_is_padding_and_a_sum():
    assert added().primitive.name == "scatter-add"
    made = as_padding(added(), [2, 0])
    assert names(made)[-2:] == ["pad", "add"]
    assert paddings(made) == [((2, 3, 0), (0, 0, 0))]


@pytest.mark.parametrize(
    "operand, update, starts",
    [
        ((64, 4), (3, 4), [2, 0]),  # a small part
        ((8, 4), (3, 4), [6, 0]),  # it hangs over the end
        ((8, 4), (3, 4), [-1, 0]),
        ((0, 4), (0, 4), [0, 0]),
    ],
)
def test_what_stays_as_it_is(operand, update, starts):
    assert as_padding(written(operand, update), starts) is None


def test_an_eighth_is_not_small():
    assert as_padding(written((64, 4), (8, 4)), [0, 0]) is not None
    assert as_padding(written((65, 4), (8, 4)), [0, 0]) is None


@pytest.mark.parametrize(
    "update, indices, starts",
    [
        (lambda x, y: x.at[2:5].add(y), [2], [2, 0]),
        (lambda x, y: x.at[:3, 1:].add(y[:, 1:]), [0, 1], [0, 1]),
        (lambda x, y: x.at[2:5].set(y), [2], [2, 0]),
        (lambda x, y: x.at[2].add(y[0]), [2], None),  # the window has not all dims
        (lambda x, y: x.at[np.array([1, 5])].add(y[:2]), [[1], [5]], None),  # two windows
    ],
)
def test_where_a_scatter_begins(update, indices, starts):
    eqn = last(update, ((8, 4), "float32"), ((3, 4), "float32"))
    assert eqn.primitive.name.startswith("scatter")
    assert scatter_starts(eqn, np.asarray(indices)) == starts

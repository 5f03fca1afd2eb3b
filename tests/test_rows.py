"""Loops that read and write rows by their index: nothing is sent, and the values are those of the plain
function.
"""

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax
from shardax.check import ramp
from shardax.cost import noted
from shardax.rewrites.driver import rewritten
from shardax.rewrites.rows import scanned_rows
from tests.graph_text import after, graph_of
from tests.loop_bodies import row, with_row

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def over(n, trip, start):
    return lax.fori_loop(0, n, trip, start)


def written(x, y):
    return over(len(x), lambda i, new: new.at[i].set(jnp.sin(x[i])), jnp.zeros_like(x))


def added(x, y):
    return over(len(x), lambda i, y: y.at[i].add(x[i] ** 2), y)


def twice(x, y):
    """What is written is read again in the same trip, and a part of it written once more."""

    def trip(i, y):
        y = y.at[i].multiply(2.0)
        return y.at[i, 3].set(y[i].sum() + x[i, 1])

    return over(len(y), trip, y)


def updated(x, y):
    return over(len(y), lambda i, y: y.at[i].set(y[i] * x[i]), y)


def columns(x, y):
    return over(x.shape[0], lambda i, y: lax.dynamic_update_index_in_dim(y, x[i] + y[:, i], i, 1), y.T).T


def picked(x, y):
    """Other indices beside the index of the loop."""
    j = jnp.array([3, -1, 40])
    return over(len(x), lambda i, y: y.at[i, j].add(x[i, j[::-1]], mode="drop"), y)


def maxima(x, y):
    return over(len(x), lambda i, most: jnp.maximum(most, x[i].sum()), -jnp.inf)


def mapped(x, y):
    return lax.map(lambda i: jnp.cumsum(x[i]), jnp.arange(len(x)))


def scanned(x, y):
    def trip(carry, j):
        y, total = carry
        return (y.at[j].min(x[j]), total + y[j].sum()), j * 2

    return lax.scan(trip, (y, 0.0), jnp.arange(len(x)), reverse=True)


def counted_by_numpy(x, y):
    return lax.scan(lambda y, j: (y.at[j].set(x[j] > 0), None), y > 0, np.arange(len(x)))[0]


def several(x, y):
    """Two arrays, of different types and ranks."""

    def trip(i, carry):
        y, n = carry
        return y.at[i].set(x[i] + y[i]), n.at[i].set((x[i] > 0).sum())

    return over(len(x), trip, (y, jnp.zeros(len(x), "int32")))


def batched(x, y):
    return jax.vmap(
        lambda x, y: over(len(x), lambda i, y: y.at[i].set(x[i] * y[i]), y), in_axes=1, out_axes=1
    )(x, y)


def noise(x, y):
    """The index itself is read."""
    key = jax.random.key(0)
    return over(
        len(x), lambda i, y: y.at[i].add(jax.random.normal(jax.random.fold_in(key, i), x[i].shape)), y
    )


def element_by_element(x, y):
    return over(len(y), lambda i, y: over(y.shape[1], lambda j, y: y.at[i, j].set(x[i, j] * y[i, j]), y), y)


def backwards(x, y):
    last = len(x) - 1
    return over(len(x), lambda i, y: y.at[-1 - i].set(y[-1 - i] * x[last - i]), y)


def downwards(x, y):
    """What is scanned goes down."""
    return lax.scan(lambda y, i: (y.at[i].add(x[i]), None), y, len(x) - 1 - jnp.arange(len(x)))[0]


def counted(x, y):
    def trip(carry):
        y, i = carry
        return y.at[i].set(jnp.sin(x[i])), i + 1

    return lax.while_loop(lambda carry: carry[1] < len(x), trip, (y, 0))


def counted_down(x, y):
    """The last row that it writes is the first."""

    def trip(carry):
        i, y = carry
        return i - 1, y.at[i].add(x[i])

    return lax.while_loop(lambda carry: 0 <= carry[0], trip, (len(x) - 1, y))


def in_branches(x, y):
    def trip(i, y):
        return lax.cond(x[i, 0] > 0, lambda: y.at[i].set(x[i] * y[i]), lambda: y)

    return over(len(y), trip, y)


def by_switch(x, y):
    """Only some branches write, and one in an inner loop."""
    again = [
        lambda i, y: y,
        lambda i, y: y.at[i].add(x[i]),
        lambda i, y: over(3, lambda j, y: y.at[i].multiply(x[i, j]), y),
    ]
    return over(len(y), lambda i, y: lax.switch(i % 3, again, i, y), y)


def where(x, y):
    return over(len(y), lambda i, y: jnp.where(x[i].sum() > 0, y.at[i].set(x[i]), y), y)


def until(x, y):
    """An inner loop goes on as long as what it writes is small."""

    def trip(i, y):
        return lax.while_loop(
            lambda y: (y[i] ** 2).sum() < 9, lambda y: y.at[i].multiply(1.5), y.at[i].add(x[i] + 0.01)
        )

    return over(len(y), trip, y)


def remat(x, y):
    return over(
        len(x), lambda i, y: y.at[i].set(jax.checkpoint(lambda x, i: jnp.sin(x[i]) * x[i, 0])(x, i)), y
    )


FREE = (
    written,
    added,
    twice,
    updated,
    columns,
    picked,
    maxima,
    mapped,
    scanned,
    counted_by_numpy,
    several,
    batched,
    noise,
)
FREE += (
    element_by_element,
    backwards,
    downwards,
    counted,
    counted_down,
    in_branches,
    by_switch,
    where,
    until,
    remat,
)


def check(f, n, spec=None, inside=None, mesh=MESH):
    x, y = ramp(n, 16), ramp(n, 16)[::-1] * 0.5

    def annotated(x, y):
        return f(*(lax.with_sharding_constraint(v, inside) for v in (x, y)))

    sharded = sx.shard_jit(annotated if inside else f, mesh=mesh, in_shardings=spec)
    with jax.set_mesh(mesh):
        for got, want in zip(jax.tree.leaves(sharded(x, y)), jax.tree.leaves(jax.jit(f)(x, y)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(initial=1))
        return sharded.plan(x, y).collectives


@pytest.mark.parametrize("f", FREE, ids=lambda f: f.__name__)
def test_sends_nothing(f):
    """Scalars that a loop adds up are reduced once."""
    found = check(f, 8, P("x"))
    assert [(c.kind, c.trips) for c in found] == [("all_reduce", 1)] * (f in (maxima, scanned))


@pytest.mark.parametrize("f", FREE, ids=lambda f: f.__name__)
def test_uneven(f):
    check(f, 7, inside=P(("y", "x")))


def inner(x, y):
    """The rows at both ends are none of the loop's."""
    return lax.fori_loop(1, len(x) - 1, lambda i, y: y.at[i].set(x[i - 1] - 2 * x[i] + x[i + 1]), y)


@pytest.mark.parametrize("n", [8, 7])
def test_neighbours_send_their_borders(n):
    found = check(inner, n, P("x") if n == 8 else None, inside=P("x") if n == 7 else None)
    assert {c.trips for c in found} == {1} and not {c.kind for c in found} & {"all_gather", "all_reduce"}
    assert sum(c.nbytes for c in found) <= 5 * 2 * 16 * 4


def turned(x, y):
    return over(len(x), lambda i, y: y.at[-1 - i].set(x[i]), y)


def test_rows_that_are_turned_around_go_to_one_device():
    assert [(c.kind, c.nbytes, c.trips) for c in check(turned, 8, P("x"))] == [("ppermute", 2 * 16 * 4, 1)]
    check(turned, 7, inside=P("x"))


def recurrence(x, y):
    return lax.fori_loop(1, len(y), lambda i, y: y.at[i].add(y[i - 1]), y)


def read_elsewhere(x, y):
    return over(len(y), lambda i, y: y.at[i].set(y.sum(0) * 0.1), y)


def past_the_end(x, y):
    return over(len(y), lambda i, y: y.at[i + 1].set(x[i], mode="drop"), y)


def before_the_start(x, y):
    return over(len(y), lambda i, y: y.at[i - 2].set(x[i]), y)


def clamped(x, y):
    return over(len(y), lambda i, y: lax.dynamic_update_slice(y, x[i][None], (i + 3, 0)), y)


def returned(x, y):
    return lax.scan(lambda y, i: (y.at[i].set(0.0), y), y, jnp.arange(3))


def every_other(x, y):
    return over(len(y) // 2, lambda i, y: y.at[2 * i].set(x[i]), y)


def by_another_carry(x, y):
    """A carry that goes by one but does not start there, and one that starts there and goes by two."""

    def trip(i, carry):
        j, k, y = carry
        return j + 1, k + 2, y.at[(j + k) % len(y)].set(x[i])

    return over(len(y), trip, (jnp.where(x[0, 0] > 0, 1, 2), 0, y))


def wraps(x, y):
    """An index of eight bits has come around before the last trip."""

    def trip(y, i):
        return y.at[i.astype("int32")].add(x[i.astype("int32")]), None

    return lax.scan(trip, y, jnp.arange(len(y)).astype("int8"))[0]


def few(x, y):
    """Where it writes few rows, it does so in place."""
    return over(2, lambda i, y: y.at[i].set(x[i]), y)


def both_ways(x, y):
    """Two trips meet in each row."""
    return over(len(y), lambda i, y: y.at[i].add(y[len(y) - 1 - i] * x[i]), y)


def in_another_type(x, y):
    """What is not written is cut off too."""
    return over(
        len(y), lambda i, y: lax.cond(x[i, 0] > 0, lambda: y.at[i].set(x[i]), lambda: jnp.floor(y)), y
    )


def shifted(x, y):
    """One carry is what another one was."""

    def trip(carry, i):
        old, new = carry
        return (new, new.at[i].add(x[i])), old[i]

    return lax.scan(trip, (y, y * 2), jnp.arange(len(y)))


@pytest.mark.parametrize(
    "f, n",
    [
        (f, 8)
        for f in (
            recurrence,
            read_elsewhere,
            past_the_end,
            before_the_start,
            clamped,
            returned,
            every_other,
            shifted,
        )
    ]
    + [(by_another_carry, 8), (wraps, 200), (few, 64), (both_ways, 8), (in_another_type, 8)],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_no_row_is_stays(f, n):
    """The array is still carried, whatever else is scanned, and the values are right."""
    check(f, n, P("x"))
    graph = rewritten(graph_of(f, ramp(n, 16), ramp(n, 16)), [scanned_rows])
    for scan in (node for node in graph.walk() if node.name == "scan"):
        consts, carries = _jax.scan_counts(scan.params)
        assert (n, 16) in [v.shape for v in scan.inputs[consts : consts + carries]]


@pytest.mark.parametrize("around, carried", [(noted.in_place, True), (nullcontext, False)])
def test_what_is_noted_to_be_written_in_place_stays(around, carried):
    def f(x, y):
        with around():
            return added(x, y)

    graph = rewritten(graph_of(f, ramp(8, 16), ramp(8, 16)), [scanned_rows])
    (scan,) = (node for node in graph.walk() if node.name == "scan")
    consts, carries = _jax.scan_counts(scan.params)
    assert ((8, 16) in [v.shape for v in scan.inputs[consts : consts + carries]]) == carried


def test_a_recurrence_gathers_once():
    """What its trips read of a split stack is sent before the loop, not in each trip."""

    def f(x, y):
        return over(len(x), lambda i, h: jnp.tanh(h + x[i]), y[0])

    assert {c.trips for c in check(f, 8, P("x"))} == {1}


@pytest.mark.once
@pytest.mark.parametrize("f", [written, added, inner, updated, backwards, in_branches, remat])
def test_gradients(f):
    """The way back reads and writes at the index of the way there."""
    gradient = jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1))
    found = check(gradient, 8, P("x"))
    assert {c.kind for c in found} <= ({"all_to_all", "ppermute"} if f is inner else set())
    check(gradient, 7, inside=P("x"))


ROWS = np.zeros((8, 2), "float32")
COUNTS = ("num_consts", "num_carry", "length", "reverse")


def left(trip, *args, n=8):
    """What is left of a loop of trip(i, *args), which gives its last argument anew."""

    def loop(*args):
        return lax.fori_loop(0, n, lambda i, last: trip(i, *args[:-1], last), args[-1])

    return after([scanned_rows], loop, *args, shows=(*COUNTS, "start_indices"))


def test_a_loop_over_rows_is_left():
    assert (
        left(lambda i, x, y: with_row(y, jnp.sin(row(x, i)), i), ROWS, ROWS)
        == """\
(a:f32[8,2] b:f32[8,2])
c:i32[] d:f32[8,2] = scan[num_consts=0 num_carry=1 length=8 reverse=False] 0 a
    (e:i32[] f:f32[2])
    g:f32[1,2] = broadcast_in_dim f
    h:i32[] = add e 1
    i:f32[1,2] = dynamic_slice g 0 0
    j:f32[1,2] = sin i
    k:f32[2] = squeeze j
    -> h k
-> d"""
    )


def test_a_loop_from_the_last_row_is_reversed():
    text = left(lambda i, x, y: with_row(y, jnp.sin(row(x, 7 - i)), 7 - i), ROWS, ROWS)
    assert text.split("\n")[1] == (
        "c:i32[] d:f32[8,2] = scan[num_consts=0 num_carry=1 length=8 reverse=True] 0 a"
    )


def test_neighbours_are_slices():
    text = left(lambda i, x, h: h + row(x, i) * row(x, i + 1), ROWS, ROWS[:1], n=7)
    assert text.split("\n")[1:4] == [
        "c:f32[7,2] = slice[start_indices=(0, 0)] a",
        "d:f32[7,2] = slice[start_indices=(1, 0)] a",
        "e:i32[] f:f32[1,2] = scan[num_consts=0 num_carry=2 length=7 reverse=False] 0 b c d",
    ]


def test_what_is_added_at_several_places_is_added_up_after_the_loop():
    def trip(i, x, total):
        zeros = jnp.zeros_like(total)
        return total + with_row(zeros, row(x, i), i) + with_row(zeros, jnp.sin(row(x, i)), i + 1)

    outside = [line for line in left(trip, ROWS, ROWS, n=7).split("\n") if not line.startswith(" ")]
    names = [re.match(r"\w+", line.split(" = ")[1])[0] for line in outside[1:-1]]
    assert names == ["slice", "scan", "pad", "add", "pad", "add"]

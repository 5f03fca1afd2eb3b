"""What is noted on the names of scopes is read back from the equations inside, and from no others."""

import jax
import numpy as np
import pytest
from jax import lax

from shardax import _jax
from shardax.cost import noted
from shardax.graph.inline import from_jaxpr
from tests.graphs import graph, the

pytestmark = pytest.mark.quick

TABLE = np.array([[0, 1], [2, 0], [1, 1], [2, 2]])  # four trips of two groups


def stack_of(f, name="sin"):
    return the(name, graph(f, (4,))).scope


def sine(around):
    def f(x):
        with around():
            return lax.sin(x)

    return f


def test_the_outermost_note_tells_the_flops():
    def f(x):
        with noted.scope("kernel", 100.0), jax.named_scope("layer"), noted.scope("part", 1.0):
            return lax.sin(x)

    found = noted.of(stack_of(f))
    assert found is not None and (found, found.flops) == ("kernel", 100.0)
    assert noted.of(stack_of(sine(lambda: jax.named_scope("kernel")))) is None


def test_slashes_part_scopes_so_a_note_has_none():
    found = noted.of(stack_of(sine(lambda: noted.scope("a/b", 2.0))))
    assert found is not None and "/" not in found and found.flops == 2.0


def test_a_note_is_on_nothing_that_is_made_after_it():
    f = lambda x: lax.cos(sine(lambda: noted.scope("kernel", 1.0))(x))  # noqa: E731
    assert noted.of(stack_of(f)) is not None and noted.of(stack_of(f, "cos")) is None


def switched(branches=3, table=TABLE, taken=None):
    def f(x, i):
        with noted.branches(table, taken):
            return lax.switch(i, [lambda x, n=n: x * n for n in range(branches)], x)

    return jax.make_jaxpr(f)(np.ones(4, "float32"), np.int32(0)).jaxpr.eqns


def conds(eqns):
    return [eqn for eqn in eqns if eqn.primitive.name == "cond"]


def test_a_cond_takes_the_branches_of_its_table():
    eqns = switched()
    (cond,) = conds(eqns)
    found = noted.branches_of(cond)
    assert found is not None and (found.table == TABLE).all() and found.taken.tolist() == [0, 1, 2]
    assert all(noted.branches_of(eqn) is None for eqn in eqns if eqn is not cond)


def test_a_cond_of_fewer_branches_than_are_noted_is_another():
    (cond,) = conds(switched(branches=2))
    assert noted.branches_of(cond) is None
    (cond,) = conds(switched(branches=2, taken=[0, 1, 1]))
    found = noted.branches_of(cond)
    assert found is not None and found.taken.tolist() == [0, 1, 1]


def test_conds_of_one_table_are_parts_of_one_instruction():
    """One of another table, be it only of another shape, stands alone."""
    eqns = [
        *switched(),
        *switched(taken=[2, 1, 0]),
        *switched(table=TABLE.reshape(2, 4)),
        *switched(branches=2),
    ]
    counts = [len(part) for part in noted.parts(eqns)]
    assert counts == [2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_in_each_trip_the_dearest_instruction_is_waited_for(seed):
    """Against going through the trips one by one."""
    rng = np.random.default_rng(seed)
    table, costs = rng.integers(0, 4, (9, 3)), rng.permutation(4)
    (cond,) = conds(switched(4, table, range(4)))
    note = noted.branches_of(cond)
    assert note is not None
    dearest = [max(row, key=lambda i: costs[i]) for row in table.tolist()]
    assert dict(note.dearest(np.argsort(costs).tolist())) == {i: dearest.count(i) for i in set(dearest)}
    totals = [sum(costs[i] for i in column) for column in table.T]
    assert note.dearest_group(costs.tolist()) == int(np.argmax(totals))


def test_a_loop_inside_the_innermost_scope_is_written_in_place():
    assert noted.is_in_place(stack_of(sine(noted.in_place)))

    def f(x):
        with noted.in_place(), jax.named_scope("other"):
            return lax.sin(x)

    assert not noted.is_in_place(stack_of(f)) and not noted.is_in_place(stack_of(lax.sin))


def test_sums_are_kept_whole_inside_any_scope():
    def f(x):
        with noted.whole_sums(), jax.named_scope("other"):
            return lax.sin(x)

    assert noted.keeps_whole_sums(stack_of(f)) and not noted.keeps_whole_sums(stack_of(lax.sin))


def nested(x):
    def body(c, _):
        with noted.whole_sums(), jax.named_scope("inner"):
            return lax.sin(c), None

    with noted.whole_sums():
        return lax.scan(body, x, length=2)[0] * np.float32(2)


def test_without_whole_sums_no_loop_has_them_and_all_else_stays():
    jaxpr = jax.make_jaxpr(nested)(np.ones(4, "float32"))
    before, after = from_jaxpr(jaxpr), from_jaxpr(noted.without_whole_sums(jaxpr))
    pairs = list(zip(before.walk(), after.walk(), strict=True))
    assert any(noted.keeps_whole_sums(node.scope) for node, _ in pairs)
    assert not any(noted.keeps_whole_sums(node.scope) for _, node in pairs)
    kept = [[n for n in _jax.scope_names(b.scope) if not isinstance(n, noted.WholeSums)] for b, _ in pairs]
    assert kept == [list(_jax.scope_names(node.scope)) for _, node in pairs] and any(kept)

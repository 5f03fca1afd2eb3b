"""`shardax.check.compare`: what is equal passes, and where something is wrong the right equation is named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import Different, compare, ramp
from shardax.reshard import run
from shardax.spmd_rules.registry import LINEAR, RULES

MESH = {"x": 2, "y": 3}


def _program(x, w, key):
    h = jnp.tanh(sx.annotate(x @ w["a"], P("x")))
    c, ys = lax.scan(lambda c, r: (c / 2 + jnp.cumsum(r), c.sum()), jnp.zeros(6), h)
    return {
        "c": jnp.sort(c),
        "ys": ys,
        "bits": jax.random.bits(key, (5, 3)),
        "half": h.astype("bfloat16"),
        "n": jnp.argmax(h),
    }


ARGS = ramp(5, 7), {"a": ramp(7, 6)}, jax.random.key(3)


def test_equal():
    text = str(compare(_program, ARGS, n=2))
    assert (
        text.startswith("_program: equal under 2 shardings\n  greatest error ") and "in_shardings=(P(" in text
    )
    same = [compare(jnp.sin, (ramp(5, 7),), n=1, seed=seed).trials[0] for seed in (5, 5, 6)]
    assert str(same[0]) == str(same[1]) != str(same[2])


def test_of_shard_jit_and_on_explicit_meshes():
    explicit = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    step = sx.shard_jit(lambda x: x.sum(0), mesh=explicit, in_shardings=P("a"))
    (trial,) = compare(step, (ramp(5, 7),), meshes=[explicit], n=1, seed=1).trials
    assert trial.mesh is explicit and trial.error < 1e-6


def _branches(x):
    return lax.cond(x.sum() > 0, jnp.sin, lambda x: jnp.cumsum(x, 0), x)


def _until(x):
    return lax.while_loop(lambda c: (c > -100).all(), lambda c: jnp.cumsum(c, 0) - 100, x)


UNLIKE_CUMSUM = {"local": None, "sends": None}
WRONG = {
    "in the program": (
        lambda x: jnp.sin(jnp.cumsum(x + 1, 0)),
        "cumsum",
        UNLIKE_CUMSUM,
        "result 0, float32[5,7]",
    ),
    "in a branch": (_branches, "cumsum", UNLIKE_CUMSUM, ", in branch 0 of the cond at"),
    "in a loop": (_until, "cumsum", UNLIKE_CUMSUM, ", in iteration 0 of the while at"),
    "passes": (
        lambda x: x.sum() * jnp.sin(x).sum(),  # two sums are reduced as one
        "mul",
        {"passes": (LINEAR(0, 1),)},
        "pending sum over",
    ),
    "padding": (
        lambda x: jnp.sort(x * 2, 0),
        "sort",
        {"rule": "... -> ...", "local": None, "sends": None},
        "its rule: ... -> ...",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_first_equation_that_differs_is_named(case, monkeypatch):
    f, name, changes, words = WRONG[case]
    monkeypatch.setitem(RULES, name, replace(RULES[name], **changes))
    with pytest.raises(Different, match="gives other numbers under x=2, y=3: in_shardings=") as error:
        compare(f, (ramp(5, 7) - 3,), meshes=[MESH], n=12)
    assert error.value.first and error.value.first.primitive == name
    assert f"equation that differs: {name} at {__file__}:" in str(error.value)
    assert words in str(error.value)


def test_a_wrong_reshard_is_named(monkeypatch):
    gathered = lax.all_gather
    monkeypatch.setattr(run.lax, "all_gather", lambda *args, **kwargs: gathered(*args, **kwargs) * 2)
    with pytest.raises(Different, match=r"operand 0, resharded from P\('x'\)@\[6\] to P\(None") as error:
        compare(lambda x: jnp.sort(sx.annotate(x + 1, P("x"))), (ramp(6),), meshes=[{"x": 2}], n=4)
    assert error.value.first and error.value.first.primitive in ("annotate", "sort")  # what reads it so first


def test_the_snippets_show_it_again(monkeypatch):
    monkeypatch.setitem(RULES, "cumsum", replace(RULES["cumsum"], **UNLIKE_CUMSUM))

    def f(x):
        return jnp.cumsum(x, 0)

    args = (ramp(5, 7),)
    with pytest.raises(Different) as error:
        compare(f, args, n=12)
    again, run = str(error.value).split("To see it again:\n")[1].split("\nor\n")
    with pytest.raises(Different, match="gives other numbers"):
        exec(again.strip(), {"shardax": sx, "f": f, "args": args})
    names = {"shardax": sx, "f": f, "args": args, "jax": jax, "P": P}
    first, last = run.strip().split("\n")
    exec(f"{first}\nresult = {last.strip()}", names)
    assert not np.allclose(names["result"], np.cumsum(args[0], 0))


def test_what_shard_jit_raises_comes_with_the_program():
    with pytest.raises(ValueError, match="refuses") as error:
        compare(
            lambda x: jnp.sort(x, 0), (ramp(8, 8),), meshes=[{"x": 8}], n=9, options=sx.Options(strict=True)
        )
    assert any(
        "raised by shard_jit in compare, x=8: in_shardings=(P('x'" in note for note in error.value.__notes__
    )


@pytest.mark.parametrize(
    "args, meshes, words",
    [
        (np.ones(3), None, r"args is ndarray: give the tuple"),
        (
            (np.ones(3), "a"),
            None,
            r"args\[1\] of compare is 'a', of type str: give an array: bind what is none with functools.partial",
        ),
        ((np.ones(3),), [{"x": 99}], r"the mesh \(x=99\) needs 99 devices, there are 8"),
    ],
)
def test_bad_input(args, meshes, words):
    with pytest.raises(ValueError, match=words):
        compare(lambda x, *_: x, args, meshes)


def _counting(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cumsum(c[1], 0) / 2), (0, x))


def _by_rows(x):
    return lax.fori_loop(0, 5, lambda i, y: y.at[i].set(jnp.cumsum(x[i]) + i), x)


@pytest.mark.parametrize("f", [_counting, _by_rows])
def test_in_loops_that_were_made_of_others(f, monkeypatch):
    """A `while` that counts becomes a scan, and a loop over rows a map: their equations still have the jaxpr
    from before.
    """
    monkeypatch.setitem(RULES, "cumsum", replace(RULES["cumsum"], **UNLIKE_CUMSUM))
    with pytest.raises(Different, match=", in iteration 0 of the scan at") as error:
        compare(f, (ramp(5, 7),), meshes=[MESH], n=12)
    assert error.value.first and error.value.first.primitive == "cumsum"

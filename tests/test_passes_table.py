"""The table of passes: each can be left out, and a user's own takes its place among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.options import PASSES as NAMES
from shardax.passes.table import ON_PLATFORM, PASSES

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


SPLIT = P("x")


def plan(f, *passes, specs=SPLIT):
    options = sx.Options(passes=passes)
    return sx.shard_jit(f, mesh=MESH, in_shardings=specs, options=options).plan(X)


X = jax.ShapeDtypeStruct((4096, 12), "float32")


def test_the_options_name_every_pass():
    assert NAMES == (*PASSES, *ON_PLATFORM)


def test_without_share_equal_halos_are_sent_twice():
    def f(x):
        return jnp.roll(x, 1, 0) + jnp.roll(x, 2, 0) - jnp.roll(x, -1, 0) * jnp.roll(x, 1, 0)

    assert plan(f, *NAMES).comm_bytes < plan(f, "dead", "combine").comm_bytes


def test_without_combine_sums_are_sent_one_by_one():
    def f(x):
        return x.sum(), jnp.square(x).sum()

    assert len(plan(f, *NAMES).collectives) < len(plan(f, "dead", "share").collectives)


def test_without_dead_what_nobody_reads_stays():
    def f(x):
        sx.annotate(x * 2, P(None, "y"))
        return x

    lines = [len(str(plan(f, *passes).local_jaxpr)) for passes in (NAMES, ())]
    assert lines[0] <= lines[1]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_passes_of_a_platform_run_where_it_is_lowered(platform):
    def f(x):
        return sx.annotate(x, P(None, "x"))

    def text(*passes):
        options = sx.Options(passes=passes)
        traced = sx.shard_jit(f, mesh=MESH, in_shardings=P("x"), options=options).trace(X)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert text(*NAMES) != text(*(name for name in NAMES if name != platform))
    assert text(*NAMES) == text("dead", "share", "combine", platform)


def test_origins_tell_layouts():
    """Of every equation inside, those of loops and of what is resharded too."""
    seen = []

    def look(jaxpr, context):
        def note(eqns):
            seen.extend((eqn, context.origin(eqn)) for eqn in eqns)
            return eqns

        return sx.map_equations(jaxpr, note)

    def f(x):
        y = jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x)
        return sx.annotate(y @ y.T, P(None, "y"))

    made = plan(f, look, specs=P("x", "y"))
    origins = {eqn.primitive.name: origin for eqn, origin in seen}
    assert (
        origins["sin"].node.name == "sin"
        and str(origins["sin"].decision.results[0].sharding) == "P('x', 'y')"
    )
    assert origins["dot_general"].node.line.endswith(f"{__file__.rsplit('/', 1)[-1]}:{line_of(f) + 2}")
    gathers = [origin for eqn, origin in seen if eqn.primitive.name == "all_gather"]
    assert gathers and all(origin.node.name in ("dot_general", "annotate", "transpose") for origin in gathers)
    assert origins["shard_map"] is None and made.collectives


def test_origins_of_sums():
    """What settles a pending sum is of the node that left it, also where a loop carried it, or a result waits for it."""
    seen = {}

    def look(jaxpr, context):
        def note(eqns):
            found = [eqn for eqn in eqns if eqn.primitive.name in ("psum", "reduce_scatter")]
            seen.update({eqn.outvars[0]: context.origin(eqn) for eqn in found})
            return eqns

        return sx.map_equations(jaxpr, note)

    def f(x):
        total = jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.sin(x).sum(0), jnp.zeros(12))
        return (x.T @ x) * 2, x.sum(1), total

    made = plan(f, look, specs=P("x", "y"))
    assert {origin.node.name for origin in seen.values()} == {"dot_general", "reduce_sum"}
    assert len(seen) == len([c for c in made.collectives if c.kind in ("all_reduce", "reduce_scatter")])
    assert all(any(layout.pending for layout in origin.decision.results) for origin in seen.values())


def line_of(f) -> int:
    return f.__code__.co_firstlineno


def test_origins_are_not_in_texts():
    """Neither in jaxprs nor in StableHLO, where names of scopes stand."""
    step = sx.shard_jit(lambda x: jnp.sin(x) * 2, mesh=MESH, in_shardings=P("x"))
    text = step.trace(X).lower(lowering_platforms=("cpu",)).as_text(debug_info=True)
    assert "Decision" not in text and "Node" not in text and "//" not in text.replace("://", "")


def test_a_pass_changes_what_runs():
    def doubled(jaxpr, context):
        def change(eqns):
            return [e.replace(primitive=jax.lax.cos_p) if e.primitive is jax.lax.sin_p else e for e in eqns]

        return sx.map_equations(jaxpr, change)

    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    options = sx.Options(passes=(*NAMES, doubled))
    f = sx.shard_jit(lambda x: jnp.sin(x), mesh=mesh, in_shardings=P("x"), options=options)
    x = np.linspace(0, 1, 9, dtype="float32")
    np.testing.assert_allclose(f(x), np.cos(x), rtol=1e-5)


@pytest.mark.parametrize(
    "result, words",
    [
        (
            lambda jaxpr: None,
            "the result of the pass 'wrong' in Options.passes is None, of type NoneType: give a ClosedJaxpr",
        ),
        (
            lambda jaxpr: jax.make_jaxpr(lambda x: x[1:])(X),
            "takes or gives other arrays than the program did: keep them",
        ),
    ],
)
def test_what_a_pass_gives_back_is_checked(result, words):
    def wrong(jaxpr, context):
        return result(jaxpr)

    with pytest.raises(ValueError, match=words):
        plan(lambda x: x + 1, wrong)


@pytest.mark.parametrize("passes", [("dad",), ["dead"], (3,), None, 3, "dead"])
def test_passes_that_are_none(passes):
    with pytest.raises(
        ValueError, match=r"Options\(passes=.*\): must be a tuple of functions and of dead, share, combine"
    ):
        sx.Options(passes=passes)

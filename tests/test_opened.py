"""Primitives that no rule is registered for: those that are programs of JAX's functions are opened, and their
equations partitioned; all others run replicated, and the warning says why.
"""

import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir.dialects import stablehlo

import shardax as sx
from shardax.rewrites.driver import rewritten
from shardax.spmd_rules.registry import RULES
from tests.graphs import graph, primitives

MESHES = {
    kind.name: jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((13, 6), "float32")  # 13 rows on 4 devices
TABLE = RNG.standard_normal((6, 5), "float32")


def primitive(name: str, like=lambda *xs, **params: xs[0]) -> Primitive:
    p = Primitive(name)
    p.def_abstract_eval(like)
    return p


def lowered_by(name: str, function, like=lambda *xs, **params: xs[0]) -> Primitive:
    p = primitive(name, like)
    mlir.register_lowering(p, mlir.lower_fun(function, multiple_results=False))
    return p


def implemented_by(name: str, function, like=lambda *xs, **params: xs[0]) -> Primitive:
    """Its lowering is made of the same function, but nothing tells so."""
    p = primitive(name, like)
    p.def_impl(function)
    rule = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(p, lambda ctx, *xs, **params: rule(ctx, *xs, **params))
    return p


def closed_over(x):
    return jnp.tanh(x @ TABLE)


def looped(x, *, times):
    return lax.fori_loop(0, times, lambda i, y: jnp.sin(y) + x * i.astype(x.dtype), x)


def row_of_table(x):
    return jax.core.ShapedArray((x.shape[0], 5), x.dtype)


table_p = lowered_by("with_table", closed_over, row_of_table)
loop_p = lowered_by("with_loop", looped)
largest_p = implemented_by(
    "largest",
    lambda x, *, dim: x.max(dim),
    lambda x, *, dim: jax.core.ShapedArray((x.shape[1 - dim],), x.dtype),
)
outer_p = lowered_by("outer", lambda x: table_p.bind(loop_p.bind(x, times=2)), row_of_table)

twice_p = lowered_by("twice", lambda x, *, by: x * by)
ad.deflinear2(twice_p, lambda g, x, *, by: [twice_p.bind(g, by=by)])
batching.primitive_batchers[twice_p] = lambda xs, dims, by: (twice_p.bind(xs[0], by=by), dims[0])

PROGRAMS = {
    "lowering, closes over an array": (table_p.bind, "dot_general tanh"),
    "lowering, a loop in it": (lambda x: loop_p.bind(x, times=3), "scan"),
    "implementation": (lambda x: largest_p.bind(x, dim=0), "reduce_max"),
    "implementation over the other dim": (lambda x: largest_p.bind(x, dim=1), "reduce_max"),
    "one in another": (outer_p.bind, "dot_general"),
    "in a loop": (
        lambda x: lax.scan(lambda y, _: (twice_p.bind(y, by=3.0), y.sum()), x, length=3),
        "scan",
    ),
    "in a branch": (lambda x: lax.cond(x[0, 0] > 0, lambda: twice_p.bind(x, by=2.0), lambda: x), "cond"),
    "twice in a row": (lambda x: twice_p.bind(twice_p.bind(x, by=2.0), by=-3.0), "mul"),
    "gradient": (jax.grad(lambda x: (twice_p.bind(x, by=3.0) ** 2).sum()), "mul"),
    "vmap": (jax.vmap(lambda row: twice_p.bind(row, by=2.0)[::-1]), "mul rev"),
    "gradient of vmap": (jax.grad(lambda x: jax.vmap(lambda r: twice_p.bind(r, by=2.0) @ r)(x).sum()), "mul"),
}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_one_device(name, kind):
    f, _ = PROGRAMS[name]
    step = sx.shard_jit(f, mesh=MESHES[kind], in_shardings=P("x", "y"))
    for x in (X, X[::-1] * 2):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), step(x), jax.jit(f)(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_in_its_place(name):
    f, nodes = PROGRAMS[name]
    made = [node.name for node in rewritten(graph(f, X.shape)).walk()]
    assert set(nodes.split()) <= {*made}
    assert {*made}.isdisjoint({"with_table", "with_loop", "largest", "outer", "twice"})


def test_rows_that_are_split_send_nothing():
    """Neither a matrix that a lowering closes over nor a loop in it gathers them."""
    step = sx.shard_jit(outer_p.bind, mesh=MESHES["Auto"], in_shardings=P("x"), out_shardings=P("x"))
    plan = step.plan(X.repeat(4, 0))
    assert not plan.collectives
    assert next(plan.results()).sharding.dims[0] == ("x",)


def test_bfloat16():
    step = sx.shard_jit(lambda x: loop_p.bind(x, times=2), mesh=MESHES["Auto"], in_shardings=P("x"))
    x = X.astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        step(x).astype("float32"), jax.jit(lambda x: looped(x, times=2))(x).astype("float32")
    )


def test_its_equations_are_on_the_line_of_the_user():
    nodes = list(rewritten(graph(lambda x: loop_p.bind(x, times=3), X.shape)).walk())
    assert len(nodes) > 3
    (line,) = {node.line for node in nodes}
    code = Path(__file__).read_text().splitlines()
    file, _, number = line.rpartition(":")
    assert file == __file__ and "loop_p.bind(x, times=3)" in code[int(number) - 1]


def test_a_rule_of_the_user_goes_before():
    p = lowered_by("ruled", lambda x: x * 2)
    sx.register_rule(p, "..., -> ...")
    try:
        assert primitives(rewritten(graph(p.bind, X.shape))) == "ruled"
    finally:
        del RULES["ruled"]
    assert primitives(rewritten(graph(p.bind, X.shape))) == "mul"


def test_the_lowering_goes_before_the_implementation():
    """It is what `jax.jit` runs."""
    p = lowered_by("two", lambda x: x * 2)
    p.def_impl(lambda x: x * 3)
    step = sx.shard_jit(p.bind, mesh=MESHES["Auto"], in_shardings=P("x"))
    np.testing.assert_array_equal(step(X), jax.jit(p.bind)(X))
    np.testing.assert_array_equal(step(X), 2 * X)


def in_island(x):
    island = jax.shard_map(
        lambda x: summed_p.bind(x) + 1,
        mesh=MESHES["Auto"],
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    return island(x)


summed_p = lowered_by("summed", lambda x: lax.psum(x, "x"))


def test_in_a_shard_map_it_may_name_the_axes():
    step = sx.shard_jit(in_island, mesh=MESHES["Auto"], in_shardings=P("x"), options=sx.Options(strict=True))
    np.testing.assert_allclose(step(X[:12]), jax.jit(in_island)(X[:12]), rtol=1e-6)
    assert any(c.kind == "all_reduce" for c in step.plan(X[:12]).collectives)


# Effects

CALLED: list[float] = []


def noting(x):
    jax.debug.callback(lambda first: CALLED.append(float(first)), x[0, 0])
    return x * 2


noting_p = lowered_by("noting", noting)


def test_a_callback_in_it_is_called_once_each_time():
    step = sx.shard_jit(lambda x: noting_p.bind(x) + 1, mesh=MESHES["Auto"], in_shardings=P("x", "y"))
    CALLED.clear()
    for x in (X, X + 1):
        np.testing.assert_allclose(step(x), 2 * x + 1, rtol=1e-6)
    jax.effects_barrier()
    np.testing.assert_allclose(CALLED, [X[0, 0], X[0, 0] + 1], rtol=1e-6)


# What is left as it is


def opaque(ctx, x, **params):
    return [stablehlo.AddOp(x, x).result]


def left(name: str, implementation=None, like=lambda x: x) -> Primitive:
    """A primitive that doubles, in MLIR."""
    p = primitive(name, like)
    mlir.register_lowering(p, opaque)
    if implementation:
        p.def_impl(implementation)
    return p


again_p = left("again", lambda x: jax.jit(again_p.bind)(x))
LEFT = {
    "no implementation": (left("alone"), ""),
    "an implementation that compiles it": (again_p, ""),
    "one for NumPy": (
        left("in_numpy", lambda x: 2 * np.asarray(x)),
        ", and its implementation cannot be traced (TracerArrayConversionError)",
    ),
    "one that gives another type": (
        left("of_type", lambda x: 2.0 * x.astype("bfloat16")),
        ", and its implementation gives bfloat16[13,6], and not float32[13,6]",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_opened_runs_replicated_and_says_why(name):
    p, why = LEFT[name]
    step = sx.shard_jit(lambda x: p.bind(x) + 1, mesh=MESHES["Auto"], in_shardings=P("x"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(step(X), 2 * X + 1)
    (message,) = (str(w.message) for w in said if p.name in str(w.message))
    assert f"has no sharding rule{why}: it runs replicated" in message
    assert "test_opened.py" in message.split(" has no")[0]


def test_an_effect_that_its_program_has_not_is_not_dropped():
    noted = graph(lambda x: (jax.debug.print("{}", x), x)[1], X.shape).nodes[-1].eqn.effects
    p = Primitive("with_effect")
    p.def_effectful_abstract_eval(lambda x: (x, noted))
    mlir.register_lowering(p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    program = rewritten(graph(lambda x: (p.bind(x), x)[1], X.shape))
    assert primitives(program) == "with_effect"

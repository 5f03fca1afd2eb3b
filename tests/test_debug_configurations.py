"""JAX's debugging configurations: under each, programs of all kinds give what jax.jit gives, on Auto and on Explicit
meshes, and what goes wrong inside is reported as jax.jit reports it.

Checks and strict promotions, of dtypes and of ranks, are on in every test: conftest.py. The others come on top.
"""

import contextlib
import functools
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESHES = {
    "auto": jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2),
    "explicit": jax.make_mesh((4, 2), ("x", "y")),
}
CONFIGURATIONS = {
    "leaks": [jax.checking_leaks],
    "numbers": [lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)],
    "nans": [lambda: jax.debug_nans(True)],
    "infs": [lambda: jax.debug_infs(True)],
    "disable_jit": [jax.disable_jit],
    "frames": [lambda: filtering("off")],
    "all": [jax.checking_leaks, lambda: jax.debug_nans(True), lambda: filtering("off")],
}
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(-1, 2, 32, dtype=np.float32).reshape(4, 8)
I = np.array([3, 0, 7, 5, 1, 1, 6, 4], np.int32)  # noqa: E741


def matmul(x, w, i):
    return jax.nn.softmax(jnp.tanh(x @ w) @ x)


def indexing(x, w, i):
    return x[i], x.at[i].add(x), x.at[i].get(mode="fill"), w[:, i].at[1, i].set(2.0, mode="drop")


def dynamic_slices(x, w, i):
    part = lax.dynamic_slice(x, (i[1], i[4]), (3, 2))
    return part, lax.dynamic_index_in_dim(x, i[0]), lax.dynamic_update_slice(x, part, (i[3], i[1]))


def sorting(x, w, i):
    return jnp.sort(w, 0), lax.sort((i, x[:, 0]), num_keys=1), lax.top_k(w, 2)


def sums(x, w, i):
    return (
        jnp.cumsum(x, 0),
        jnp.cumsum(i),
        lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    )


def scan(x, w, i):
    def trip(carry, row_and_index):
        row, j = row_and_index
        return carry * 0.5 + row + x[j], (carry.sum(), j + 1)

    return lax.scan(trip, x[0], (x, i))


def while_loop(x, w, i):
    """With a trip count that is known, so that it has a gradient."""
    return lax.fori_loop(0, 8, lambda t, ys: ys.at[t].set(jnp.sin(ys[i[t]])), x)


def cond(x, w, i):
    return lax.cond(i[0] > 2, lambda x, i: (x * 2, i), lambda x, i: (x[::-1], i + 1), x, i)


def fft(x, w, i):
    return jnp.abs(jnp.fft.rfft(x + 2, axis=0))


def conv(x, w, i):
    kernel = jnp.reshape(w[:, :3], (1, 4, 3)).transpose(2, 1, 0)
    return lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def random_bits(x, w, i):
    key = jax.random.key(i[0])
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return (
        jnp.where(keep, x, 0),
        jax.random.bits(key, (8, 2)),
        jax.random.normal(jax.random.fold_in(key, 1), (8,)),
    )


@jax.custom_vjp
def doubled(x, i):
    return 2 * x[i]


doubled.defvjp(
    lambda x, i: (2 * x[i], (x, i)),
    lambda saved, ct: (jnp.zeros_like(saved[0]).at[saved[1]].add(3 * ct), None),
)


def custom_vjp(x, w, i):
    return doubled(x, i)


def train_steps(x, w, i):
    """Two, in a loop that has collectives: over the rows, and for the norm of the gradients."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def loss(params, rows):
        return (jnp.tanh(rows @ params["w"] + params["b"][None]) ** 2).mean()

    def step(carry, rows):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = {"w": w, "b": x[:, 0]}
    return lax.scan(step, (params, tx.init(params)), x.reshape(2, 4, 4))


def island(x, w, i):
    """With a collective of the user's; a mesh in context is the one that it runs on."""
    mesh = MESHES["auto"] if jax.sharding.get_abstract_mesh().empty else None
    products = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x) @ x.T, "y"), mesh=mesh, in_specs=P("x", "y"), out_specs=P("x")
    )
    return jnp.tanh(products(x)), (w * w).sum()


def remat(x, w, i):
    return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w) @ x))(x)


def integers(x, w, i):
    """Their tangents, float0, go through loops and gathers."""
    stepped = lax.scan(lambda j, k: (j + k, x[k % 8] * j.astype(x.dtype)), i[0], i)
    gradient = jax.grad(lambda x, i: (x[i] * x).sum(), argnums=(0, 1), allow_int=True)(x, i)[0]
    return (
        stepped,
        gradient,
        jax.jvp(lambda i: lax.rev(i, (0,)), (i,), (np.zeros(i.shape, jax.dtypes.float0),))[0],
    )


PROGRAMS = [
    matmul,
    indexing,
    dynamic_slices,
    sorting,
    sums,
    scan,
    while_loop,
    cond,
    fft,
    conv,
    random_bits,
    custom_vjp,
    remat,
    train_steps,
    island,
    integers,
]  # fmt: skip


def sharded(f, mesh="auto"):
    return sx.shard_jit(f, mesh=MESHES[mesh], in_shardings=(P("x", "y"), P("y", "x"), P("x")))


def in_context(mesh):
    """What JAX itself asks for where gradients have Explicit types."""
    return jax.set_mesh(MESHES[mesh]) if mesh == "explicit" else contextlib.nullcontext()


@contextlib.contextmanager
def filtering(mode):
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@contextlib.contextmanager
def under(configuration, mesh="auto"):
    with in_context(mesh), contextlib.ExitStack() as stack:
        for setting in CONFIGURATIONS[configuration]:
            stack.enter_context(setting())
        yield


def total(f):
    """A number of all floats that `f` gives, and those."""

    def g(x, w, i):
        out = f(x, w, i)
        floats = [leaf for leaf in jax.tree.leaves(out) if leaf.dtype == jnp.float32]
        return sum((leaf * leaf).sum() for leaf in floats), out

    return g


def gradient(f):
    return jax.value_and_grad(total(f), (0, 1, 2), has_aux=True, allow_int=True)


def batched(f):
    return lambda x, w, i: jax.vmap(f, (0, None, 0))(np.stack([x, 2 * x]), w, np.stack([i, i[::-1]]))


@functools.cache
def expected(form, program):
    """What jax.jit gives, in a form of the program, without any configuration."""
    return form(jax.jit(program))(X, W, I)


def check(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if w.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


SOME = matmul, scan, train_steps, integers
FORMS_ON = [  # what is run, of which programs, on which mesh and under which configuration
    (gradient, PROGRAMS, "auto", "leaks"),
    (gradient, PROGRAMS, "auto", "numbers"),
    (gradient, PROGRAMS, "auto", "disable_jit"),
    (gradient, SOME, "auto", "all"),
    (gradient, PROGRAMS, "explicit", "leaks"),
    (batched, PROGRAMS, "explicit", "leaks"),
    (gradient, SOME, "explicit", "numbers"),
    (gradient, [remat], "explicit", "disable_jit"),
    (gradient, [remat], "explicit", "all"),
]


@pytest.mark.parametrize(
    "form, program, mesh, configuration",
    [
        pytest.param(
            form,
            program,
            *on,
            id="-".join((program.__name__, form.__name__, *on)),
            marks=[] if program in SOME else [pytest.mark.once],
        )
        for form, programs, *on in FORMS_ON
        for program in programs
    ],
)
def test_programs(form, program, mesh, configuration):
    want = expected(form, program)
    with under(configuration, mesh):
        check(form(sharded(program, mesh))(X, W, I), want)


def test_one_operation_after_the_other_on_placed_arguments():
    want, x = expected(gradient, remat), jax.device_put(X, jax.NamedSharding(MESHES["explicit"], P("x")))
    with under("disable_jit", "explicit"):
        check(gradient(sharded(remat, "explicit"))(x, W, I), want)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_donated_state(configuration, mesh):
    def step(state, x):
        new = {"w": state["w"] - 0.1 * (x.T @ (x @ state["w"])), "count": state["count"] + 1}
        return new, (new["w"] ** 2).sum()

    state = {"w": W, "count": np.int32(0)}
    want = step(step(state, X)[0], X)
    specs = {"w": P("x", "y"), "count": P()}
    with under(configuration, mesh):
        f = sx.shard_jit(step, mesh=MESHES[mesh], in_shardings=(specs, P("x")), donate_argnums=0)
        check(jax.tree.map(jnp.asarray, f(f(jax.tree.map(jnp.array, state), X)[0], X)), want)


def reported(f, *args) -> str:
    with pytest.raises(FloatingPointError) as error:
        jax.block_until_ready(f(*args))
    return str(error.value).splitlines()[0]


FORMS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(lambda x, w: f(x, w).sum()),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w),
    "jit": jax.jit,
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind, function", [("nans", jnp.log), ("infs", lambda x: jnp.exp(-x))])
def test_where_it_was_made_is_reported(kind, function, form, mesh):
    """Made between collectives, in the words and with the primitive of jax.jit's report."""

    def f(x, w):
        return function(x @ w - 100) @ jnp.abs(x)

    made = sx.shard_jit(f, mesh=MESHES[mesh], in_shardings=(P("x", "y"), P("y", "x")))
    with under(kind, mesh):
        assert reported(FORMS[form](made), X, W) == reported(FORMS[form](jax.jit(f)), X, W)


@pytest.mark.parametrize("mesh", MESHES)
def test_made_in_the_backward_pass(mesh):
    f = lambda x: (jnp.sqrt(x) * 0).sum()  # noqa: E731
    made = sx.shard_jit(f, mesh=MESHES[mesh], in_shardings=P("x"))
    with under("nans", mesh):
        assert reported(jax.grad(made), X * 0) == reported(jax.grad(jax.jit(f)), X * 0)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mode", ["off", "tracebackhide", "remove_frames"])
def test_traceback_filtering(mode, mesh):
    """The user's lines are shown in each mode, ours where JAX's are."""

    def broken(x, w, i):
        def trip(carry, row):
            raise KeyError("in the function")

        return lax.scan(trip, x[0], x)

    def frames(f) -> list[str]:
        with pytest.raises(KeyError, match="in the function") as error:
            f(X, W, I)
        return [frame.filename for frame in traceback.extract_tb(error.value.__traceback__)]

    with filtering(mode), in_context(mesh):
        ours, jaxs = frames(sharded(broken, mesh)), frames(jax.jit(broken))
    assert ours[-1] == jaxs[-1] == __file__
    shown = any("/shardax/" in name for name in ours), any("/jax/" in name for name in jaxs)
    assert shown == (mode != "remove_frames",) * 2


@pytest.mark.checks
def test_the_suite_runs_under_checks_and_strict_promotions():
    assert jax.config.jax_enable_checks  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion='raise'"):
        jnp.add(X, X[0])
    with pytest.raises(Exception, match="jax_numpy_dtype_promotion=strict"):
        jnp.add(X, np.arange(4, dtype=np.int32))


@pytest.mark.promotes_ranks
def test_where_users_promote_ranks_shardax_may_not():
    def made_in(file: str):
        scope = {}
        exec(compile("def promoting(x): return x + x[0]", file, "exec"), scope)
        return scope["promoting"]

    ours = str(Path(sx.__file__).parent / "sums.py")
    jax.eval_shape(made_in(__file__), jnp.ones((3, 5)))  # of shapes that no other test adds: JAX warns once
    with pytest.raises(AssertionError, match="sums.py:1 promoting: Following NumPy automatic rank promotion"):
        jax.eval_shape(made_in(ours), jnp.ones((5, 3)))

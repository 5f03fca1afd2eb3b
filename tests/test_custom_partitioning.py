"""custom_partitioning: rules, callbacks and what they send, against the plain function."""

import functools
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import BATCHING, ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = pytest.mark.promotes_ranks

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
THREE = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)


def _array(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def _equal(f, args, specs, mesh=MESH, out=None):
    """The plan of f, whose results under these shardings are those of f unsharded."""
    wanted = jax.jit(f)(*args)
    step = sx.shard_jit(f, mesh=mesh, in_shardings=specs, out_shardings=out)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), step(*args), wanted)
    return step.plan(*args)


def _sent(plan):
    return [(c.kind, c.axes, c.shape) for c in plan.collectives]


def _shardings(shapes):
    return jax.tree.map(lambda x: x.sharding, shapes)


ASKED = []


@custom_partitioning
def matmul(a, b):
    return a @ b


def _partition_matmul(mesh, args, result):
    (a, b), out = _shardings(args), result.sharding
    ASKED.append((a.spec, b.spec, out.spec))
    k = a.spec[1]
    return mesh, lambda a, b: a @ b if k is None else jax.lax.psum(a @ b, k), out, (a, b)


matmul.def_partition(_partition_matmul, sharding_rule="i j, j k -> i k", reduction_factors=("j",))


@pytest.mark.parametrize("sizes", [(8, 18, 4), (9, 8, 5), (3, 3, 3), (0, 4, 4), (4, 0, 4)])
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("y", "x"))])
def test_matmul(sizes, spec):
    m, k, n = sizes
    _equal(lambda a, b: matmul(a * 2, b) + 1, (_array(m, k), _array(k, n, seed=1)), (spec, None))


def test_matmul_sends_its_own_sum():
    plan = _equal(lambda a, b: matmul(a, b), (_array(8, 16), _array(16, 4)), (P("y", "x"), P("x")))
    assert _sent(plan) == [("all_reduce", ("x",), (4, 4))]
    assert plan.collectives[0].line.endswith(
        f"test_custom_partitioning.py:{_partition_matmul.__code__.co_firstlineno + 4}"
    )
    assert (P("y", "x"), P("x", None), P("y", None)) in ASKED


def test_matmul_on_three_axes_and_bf16():
    args = (_array(8, 12), _array(12, 6, seed=1))
    plan = _equal(lambda a, b: matmul(a, b), args, (P("x", ("z", "y")), P(("z", "y"))), THREE, P("x", None))
    assert _sent(plan) == [("all_reduce", ("z", "y"), (4, 6))]
    args = tuple(jnp.asarray(np.round(x), jnp.bfloat16) for x in args)
    _equal(lambda a, b: matmul(a, b).astype("float32"), args, (P("x", "y"), P("y", "z")), THREE)


def test_uneven_sums_stay_whole():
    """Its function sums over what an axis splits: it could count what is past the end."""
    plan = _equal(lambda a, b: matmul(a, b), (_array(8, 16), _array(16, 4)), (None, None))
    assert not plan.collectives
    del ASKED[:]
    plan = _equal(lambda a, b: matmul(a, b), (_array(8, 18), _array(18, 4)), (P(None, "x"), None))
    assert (
        "all_reduce" not in {c.kind for c in plan.collectives}
        and (P(None, "x"), P("x", None), P(None, None)) in ASKED
    )


# The example of JAX's documentation


def _supported(sharding, shape):
    dims = (*sharding.spec, *[None] * len(shape.shape))[: len(shape.shape) - 1]
    return NamedSharding(sharding.mesh, P(*dims, None))


def _partition_fft(mesh, args, result):
    supported = _supported(args[0].sharding, args[0])
    return mesh, jnp.fft.fft, supported, (supported,)


def _infer_fft(mesh, args, result):
    return _supported(args[0].sharding, args[0])


def _fft(**params):
    f = custom_partitioning(lambda x: jnp.fft.fft(x))
    f.def_partition(_partition_fft, infer_sharding_from_operands=_infer_fft, **params)
    return f


FFTS = {
    "string": {"sharding_rule": "...i -> ...i"},
    "object": {
        "sharding_rule": SdyShardingRule((ArrayMapping(BATCHING, "i"),), (ArrayMapping(BATCHING, "i"),))
    },
    "whole": {"sharding_rule": "... i -> ... i", "need_replication_factors": ("i",)},
    "callable": {
        "sharding_rule": lambda mesh, ins, outs: (
            " ".join("abc"[: ins[0].rank]) + " -> " + " ".join("abc"[: outs[0].rank])
        )
    },
    "callable, whole": {
        "sharding_rule": lambda mesh, ins, outs: ("... i -> ... i", {"need_replication_factors": ("i",)})
    },
}


@pytest.mark.parametrize("name", FFTS)
def test_fft(name):
    f = _fft(**FFTS[name])
    x = _array(8, 16).astype("complex64")
    assert not _equal(lambda x: f(x), (x,), P("x")).collectives
    kinds = {c.kind for c in _equal(lambda x: f(x * 2), (x,), P(None, "x")).collectives}
    assert kinds == {
        "all_to_all"
    }  # also of those that claim to take it split, and of which the partition says otherwise


@pytest.mark.parametrize("sizes", [(7, 10), (3, 4, 8), (16,)])
def test_fft_of_uneven_dims(sizes):
    f = _fft(**FFTS["string"])
    for spec in [P("x"), P(*[None] * (len(sizes) - 1), ("x", "y"))]:
        plan = _equal(lambda x: f(x * 2), (_array(*sizes).astype("complex64"),), spec)
        assert {c.kind for c in plan.collectives} <= {"all_gather", "all_to_all", "ppermute"}


@pytest.fixture
def gspmd():
    """Of the two partitioners of JAX, the one that reads infer_sharding_from_operands."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize("sizes", [(8, 16), (7, 10)])
def test_without_a_rule(gspmd, sizes):
    f = _fft()
    x = _array(*sizes).astype("complex64")
    assert sizes[0] != 8 or not _equal(lambda x: f(x), (x,), P("x")).collectives
    _equal(lambda x: f(x), (x,), P("x"))
    _equal(lambda x: f(x), (x,), P(None, "x"))
    both = custom_partitioning(lambda a, b: (a @ b, b.sum(0)))
    both.def_partition(
        lambda mesh, args, result: (
            mesh,
            lambda a, b: (a @ b, b.sum(0)),
            tuple(
                NamedSharding(mesh, P(*d))
                for d in ((args[0].sharding.spec[0], args[1].sharding.spec[1]), (args[1].sharding.spec[1],))
            ),
            tuple(
                NamedSharding(mesh, P(*d))
                for d in ((args[0].sharding.spec[0], None), (None, args[1].sharding.spec[1]))
            ),
        ),
        lambda mesh, args, result: (
            NamedSharding(mesh, P(args[0].sharding.spec[0], args[1].sharding.spec[1])),
            NamedSharding(mesh, P(args[1].sharding.spec[1])),
        ),
    )
    args = (_array(8, 6), _array(6, 4, seed=1))
    plan = _equal(lambda a, b: both(a, b), args, (P("x"), P(None, "y")))
    assert not plan.collectives
    assert [s.spec for s in plan.out_shardings] == [P("x", "y"), P("y")]
    _equal(lambda a, b: both(a, b), args, (P(None, "y"), P("y")))


# rmsnorm: its function sends, and knows how many elements there are


def _partition_rmsnorm(mesh, args, result):
    x, scale = _shardings(args)
    features = x.spec[1]

    def lower(x, scale):
        total = (x * x).sum(-1, keepdims=True)
        total = total if features is None else jax.lax.psum(total, features)
        count = x.shape[-1] * (1 if features is None else jax.lax.psum(1, features))
        return x * jax.lax.rsqrt(total / count + 1e-6) * scale

    return mesh, lower, x, (x, NamedSharding(mesh, P(features)))


def _norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


rmsnorm = custom_partitioning(_norm)
rmsnorm.def_partition(_partition_rmsnorm, sharding_rule="b d, d -> b d")


@jax.custom_vjp
def differentiable(x, scale):
    return rmsnorm(x, scale)


differentiable.defvjp(
    lambda x, scale: (rmsnorm(x, scale), (x, scale)),
    lambda saved, ct: jax.vjp(_norm, *saved)[1](ct),
)


@pytest.mark.parametrize("sizes, mesh", [((8, 18), MESH), ((7, 10), THREE), ((5, 15), MESH)])
def test_rmsnorm(sizes, mesh):
    args = (_array(*sizes), _array(sizes[1], seed=1))
    specs = (P("x", "y"), None)
    f = lambda x, scale: differentiable(x + 1, scale) * 2  # noqa: E731
    plan = _equal(f, args, specs, mesh)
    even = sizes[1] % mesh.shape["y"] == 0
    assert ("all_reduce" in {c.kind for c in plan.collectives}) == even
    _equal(jax.grad(lambda x, scale: (f(x, scale) ** 2).sum(), (0, 1)), args, specs, mesh)


def test_loops_layers_and_checkpoints():
    x, scale = _array(8, 16), _array(16, seed=1)

    def loss(x, scale):
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(differentiable(x, scale)), None), x, None, length=3)
        for _ in range(2):
            x = jax.checkpoint(differentiable)(x, scale)
        return (x**3).mean()

    _equal(jax.value_and_grad(loss), (x, scale), (P("x", "y"), None))


def test_as_jax_has_no_derivative_and_no_batching_of_it():
    step = sx.shard_jit(lambda x, s: rmsnorm(x, s).sum(), mesh=MESH)
    with pytest.raises(NotImplementedError, match="[Dd]ifferentiation rule for 'custom_partitioning'"):
        jax.grad(step)(_array(8, 16), _array(16))
    with pytest.raises(NotImplementedError, match="[Bb]atching rule for 'custom_partitioning'"):
        jax.vmap(step)(_array(2, 8, 16), _array(2, 16))


# What callbacks may do


def test_results_where_the_callback_puts_them():
    f = custom_partitioning(lambda a, b: a @ b)

    def partition(mesh, args, result):
        k = args[0].sharding.spec[1]
        made = NamedSharding(mesh, P(k, None))
        taken = NamedSharding(mesh, P(None, k)), NamedSharding(mesh, P(k, None))
        return (
            mesh,
            lambda a, b: a @ b if k is None else jax.lax.psum_scatter(a @ b, k, tiled=True),
            made,
            taken,
        )

    f.def_partition(partition, sharding_rule="i j, j k -> i k", reduction_factors=("j",))
    plan = _equal(lambda a, b: f(a, b), (_array(8, 8), _array(8, 8)), (P(None, "x"), P("x")), out=P("x"))
    assert _sent(plan) == [("reduce_scatter", ("x",), (8, 8))]
    plan = _equal(lambda a, b: f(a, b), (_array(8, 8), _array(8, 8)), (P(None, "x"), P("x")), out=P(None))
    assert {c.kind for c in plan.collectives} == {"reduce_scatter", "all_gather"}


def test_operands_where_the_callback_wants_them():
    f = custom_partitioning(lambda x: x.cumsum(0))

    def partition(mesh, args, result):
        """However it is asked, it splits the columns."""
        columns = NamedSharding(mesh, P(None, "x"))
        return mesh, lambda x: x.cumsum(0), columns, (columns,)

    f.def_partition(partition, sharding_rule="i j -> i j")
    plan = _equal(lambda x: f(x), (_array(8, 8),), P("x"), out=P("x"))
    assert {c.kind for c in plan.collectives} == {"all_to_all"}
    _equal(lambda x: f(x), (_array(8, 7),), P("x"), out=P("x"))


def test_windows_and_permutations():
    """A factor of two sizes; a factor whose function permutes."""
    pairs = custom_partitioning(lambda x: x[::2] + x[1::2])
    keep = lambda f: lambda mesh, args, result: (mesh, f, result.sharding, (args[0].sharding,))  # noqa: E731
    pairs.def_partition(keep(lambda x: x[::2] + x[1::2]), sharding_rule="i j -> i j")
    assert not _equal(lambda x: pairs(x), (_array(16, 4),), P("x", "y"), out=P("x", "y")).collectives
    _equal(lambda x: pairs(x), (_array(18, 5),), P("x", "y"))
    turned = custom_partitioning(lambda x: x[::-1])

    def partition(mesh, args, result):
        axis = args[0].sharding.spec[0]
        n = 1 if axis is None else mesh.shape[axis]

        def lower(x):
            return x[::-1] if n == 1 else jax.lax.ppermute(x[::-1], axis, [(i, n - 1 - i) for i in range(n)])

        return mesh, lower, args[0].sharding, (args[0].sharding,)

    turned.def_partition(partition, sharding_rule="i -> i", permutation_factors=("i",))
    assert _sent(_equal(lambda x: turned(x), (_array(8),), P("x"))) == [("ppermute", ("x",), (2,))]
    _equal(lambda x: turned(x), (_array(10),), P("x"))


def test_static_arguments_trees_and_compound_factors():
    f = custom_partitioning(lambda n, xs: {"sum": xs["a"].reshape(-1, n) + xs["b"]}, static_argnums=(0,))

    def partition(n, mesh, args, result):
        return (
            mesh,
            lambda xs: {"sum": xs["a"].reshape(-1, n) + xs["b"]},
            {"sum": result["sum"].sharding},
            _shardings(args),
        )

    f.def_partition(partition, sharding_rule="(i j), i j -> i j")
    args = ({"a": _array(32), "b": _array(8, 4)},)
    plan = _equal(lambda xs: f(4, xs), args, ({"a": P("x"), "b": P("x")},))
    assert not plan.collectives and plan.out_shardings["sum"].spec == P("x", None)
    _equal(lambda xs: f(4, xs), ({"a": _array(28), "b": _array(7, 4)},), ({"a": P("x"), "b": None},))
    g = custom_partitioning(lambda x: x.reshape(2, 4).T.reshape(8))
    g.def_partition(
        lambda mesh, args, result: (
            mesh,
            lambda x: x.reshape(2, 4).T.reshape(8),
            *[NamedSharding(mesh, P())] * 1,
            (NamedSharding(mesh, P()),),
        ),
        sharding_rule="(a b) -> (b a)",
        a=2,
        b=4,
    )
    _equal(lambda x: g(x), (_array(8),), P("x"))


def test_axes_that_the_program_cuts():
    """What the callback sees has the user's names where the program's mesh has finer ones."""
    f = lambda x, scale, z: (differentiable(x, scale), z.reshape(2, 12) * 2)  # noqa: E731
    args = (_array(8, 16), _array(16), _array(24))
    plan = _equal(f, args, (P("y", "x"), None, P("x")))
    assert "x.1" in str(plan.local_jaxpr) and ("all_reduce", ("x",), (4, 1)) in _sent(plan)
    placed = custom_partitioning(lambda x: x + jnp.arange(16.0))

    def partition(mesh, args, result):
        (axis,) = args[0].sharding.spec
        start = lambda n: 0 if axis is None else jax.lax.axis_index(axis) * n  # noqa: E731
        lower = lambda x: x + (jnp.arange(x.shape[0]) + start(x.shape[0])).astype("float32")  # noqa: E731
        return mesh, lower, args[0].sharding, (args[0].sharding,)

    placed.def_partition(partition, sharding_rule="i -> i")
    plan = _equal(lambda x, z: (placed(x), z.reshape(2, 12) * 2), (_array(16), _array(24)), (P("x"), P("x")))
    assert "x.1" in str(plan.local_jaxpr) and {c.reason for c in plan.collectives} == {"reshape in P(None)"}


def test_names_of_many_letters():
    """The place of a shard counts as sent: where blocks of an uneven dim begin, the function cannot know."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    f = custom_partitioning(lambda x: x + jnp.arange(x.shape[0], dtype="float32"))

    def partition(mesh, args, result):
        n = 10 // mesh.shape["data"]  # not the length of a block
        lower = lambda x: x + (jnp.arange(x.shape[0]) + jax.lax.axis_index("data") * n).astype("float32")  # noqa: E731
        same = NamedSharding(mesh, P("data"))
        return mesh, lower, same, (same,)

    f.def_partition(partition, sharding_rule="i -> i")
    _equal(lambda x: f(x), (_array(10),), P("data"), mesh)


def test_where_nothing_is_asked():
    f = custom_partitioning(lambda x: jnp.sin(x))

    def never(*args):
        raise AssertionError("asked")

    f.def_partition(never, sharding_rule="i -> i")
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    _equal(lambda x: f(x), (_array(8),), P("x"), one)
    inside = lambda x: f(x) + jax.lax.psum(x.sum(), "x")  # noqa: E731
    island = jax.shard_map(inside, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    _equal(island, (_array(8),), P("x"))


def test_refusals_that_need_not_be():
    """A callback that knows what to do with all split, and with nothing else."""
    f = custom_partitioning(lambda x: x.sum(1))

    def partition(mesh, args, result):
        axis = args[0].sharding.spec[1]
        assert axis is not None
        return mesh, lambda x: jax.lax.psum(x.sum(1), axis), result.sharding, _shardings(args)

    f.def_partition(partition, sharding_rule="i j -> i", reduction_factors=("j",))
    plan = _equal(lambda x: f(x), (_array(8, 8),), P(None, "x"))
    assert _sent(plan) == [("all_reduce", ("x",), (8,))]


def _asked_for(rule, partition=None, **kinds):
    f = custom_partitioning(lambda x: x * 2)
    keep = lambda mesh, args, result: (mesh, lambda x: x * 2, result.sharding, _shardings(args))  # noqa: E731
    f.def_partition(partition or keep, sharding_rule=rule, **kinds)
    return sx.shard_jit(lambda x: f(x), mesh=MESH, in_shardings=P("x"))


@pytest.mark.parametrize(
    "rule, why",
    [
        ("i, i -> i", "it has 2 operands, the function has 1"),
        ("i j -> i j, i", "it has 2 results, the function has 1"),
        ("i -> i", r"at 'i': it names 1 dims, the shape is \(8, 4\)"),
        ("... i j k -> ... i j k", "at '... i j k': it names 3 dims"),
        ("(i j) k -> i k", "do not multiply|size"),
    ],
)
def test_rules_that_do_not_fit(rule, why):
    kinds = {"j": 3} if "(" in rule else {}
    line = rf"custom_partitioning at .*test_custom_partitioning.py:\d+: sharding_rule '{re.escape(rule)}'.*: .*({why})"
    with pytest.raises(ValueError, match=line):
        _asked_for(rule, **kinds)(_array(8, 4))


ANSWERS = {
    "no shardings": (
        lambda mesh, args, result: (mesh, jnp.sin, None, (None,)),
        "partition gave back None: give a NamedSharding",
    ),
    "mesh": (
        lambda mesh, args, result: (THREE, jnp.sin, result.sharding, _shardings(args)),
        "partition gave back a mesh with axes {'x': 2, 'y': 2, 'z': 2}, the program's has {'x': 4, 'y': 2}",
    ),
    "shapes": (
        lambda mesh, args, result: (mesh, lambda x: x.sum(0), result.sharding, _shardings(args)),
        r"lower_fn makes float32\[4\] of shards of shapes \(2, 4\), .* promise float32\[2, 4\]",
    ),
    "dtype": (
        lambda mesh, args, result: (mesh, lambda x: x > 0, result.sharding, _shardings(args)),
        "lower_fn makes bool",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_do_not_fit(name):
    partition, why = ANSWERS[name]
    with pytest.raises(ValueError, match=rf"custom_partitioning at .*test_custom_partitioning.py:\d+: {why}"):
        _asked_for("i j -> i j", partition)(_array(8, 4))


def test_a_callback_that_raises():
    def partition(mesh, args, result):
        raise KeyError("rows")

    with pytest.raises(KeyError, match="rows") as caught:
        _asked_for("i j -> i j", partition)(_array(8, 4))
    assert "in the partition callback of custom_partitioning at " in caught.value.__notes__[0]
    assert traceback.extract_tb(caught.tb)[-1].name == "partition"


@pytest.mark.parametrize("rows", [8, 10])
def test_a_function_of_shards_that_raises(rows):
    """Also on shards of uneven dims."""

    def lower(x):
        raise KeyError("rows")

    partition = lambda mesh, args, result: (mesh, lower, result.sharding, _shardings(args))  # noqa: E731
    with pytest.raises(KeyError, match="rows") as caught:
        _asked_for("i j -> i j", partition)(_array(rows, 4))
    ours = (
        r"in the lower_fn of custom_partitioning at .*test_custom_partitioning.py:\d+, on shards of shapes "
    )
    assert any(re.match(ours, note) for note in caught.value.__notes__)  # JAX has notes of its own
    assert traceback.extract_tb(caught.tb)[-1].name == "lower"


@pytest.mark.parametrize("callback", ["infer_sharding_from_operands", "sharding_rule"])
def test_other_callbacks_that_raise(callback, request):
    if callback == "infer_sharding_from_operands":
        request.getfixturevalue("gspmd")

    def raising(*args):
        raise KeyError("rows")

    keep = lambda mesh, args, result: (mesh, jnp.sin, result.sharding, _shardings(args))  # noqa: E731
    f = custom_partitioning(jnp.sin)
    f.def_partition(keep, **{callback: raising})
    with pytest.raises(KeyError, match="rows") as caught:
        sx.shard_jit(lambda x: f(x), mesh=MESH, in_shardings=P("x"))(_array(8, 4))
    where = rf"in the {callback} (callback )?of custom_partitioning at .*test_custom_partitioning.py:\d+"
    assert re.match(where, caught.value.__notes__[0])


def test_a_function_that_takes_no_shards_of_uneven_dims():
    f = custom_partitioning(lambda x: x * 2)

    def partition(mesh, args, result):
        n = mesh.shape["x"] if args[0].sharding.spec[0] else 1
        lower = lambda x: x.reshape(10 // n, 4) * 2  # noqa: E731
        return mesh, lower, result.sharding, _shardings(args)

    f.def_partition(partition, sharding_rule="i j -> i j")
    step = sx.shard_jit(lambda x: f(x), mesh=MESH, in_shardings=P("x"))
    warned = (
        r"custom_partitioning at .*:\d+: its lower_fn does not take shards of uneven dims: TypeError: .*resh"
    )
    with pytest.warns(UserWarning, match=warned):
        plan = step.plan(_array(10, 4))
    assert {c.kind for c in plan.collectives} == {"all_gather"}


def test_a_plan_needs_no_devices():
    mesh = MESH.abstract_mesh
    step = sx.shard_jit(lambda a, b: matmul(a, b), mesh=mesh, in_shardings=(P("y", "x"), P("x")))
    assert [c.kind for c in step.plan(_array(8, 16), _array(16, 4)).collectives] == ["all_reduce"]

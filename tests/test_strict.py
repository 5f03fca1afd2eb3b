"""Strictness: what nobody asked for is refused, warned of or allowed, in messages that say the way out."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def spectrum(x):
    return jnp.fft.rfft(x.reshape(-1)).real


BY_DATA = P("data")


def plan(fun=spectrum, spec=BY_DATA, args=(X,), **options):
    return sx.shard_jit(fun, mesh=MESH, in_shardings=spec, options=sx.Options(**options)).plan(*args)


def refusal(**options) -> str:
    with pytest.raises(ValueError) as error:
        plan(**options)
    return re.sub(r"/\S*/tests/(\w+\.py):\d+", r"tests/\1:LINE", str(error.value))


def test_strict_refuses_what_nobody_asked_for():
    assert refusal(strict=True) == (
        "Options(strict=True, max_gather_bytes=None, allow=()) refuses:\n  fft at "
        "tests/test_strict.py:LINE needs an operand in P(None), which no annotation asks for: all_gather "
        "over data (each device sends 384 B per call). Annotate the operand, as in shardax.annotate(x, "
        "P(None)), split it otherwise, or allow it: Options(allow=('fft',))"
    )


def test_what_is_refused_can_be_printed():
    """The error holds the plan, of a primitive without a rule too."""
    for options in ({"strict": True}, {"max_gather_bytes": 100}):
        with pytest.raises(sx.Refused) as error:
            plan(**options)
        assert error.value.plan.diff(plan()) == ""
        assert "all_gather over data of f32[32]" in str(error.value.plan)


def test_strict_warns():
    with pytest.warns(UserWarning, match="fft at .*test_strict.py:.* needs an operand in P.None."):
        warned = plan(strict="warn")
    assert warned.comm_bytes == plan().comm_bytes


@pytest.mark.parametrize("pattern", ["fft", "all_gather", "*/test_strict.py:*", "f*"])
def test_allowed(pattern):
    assert plan(strict=True, allow=(pattern,)).comm_bytes > 0


def test_other_patterns_do_not_allow():
    refusal(strict=True, allow=("cumsum", "all_to_all", "other.py:*"))


def test_what_annotations_ask_for_is_allowed():
    assert plan(lambda x: spectrum(sx.annotate(x, P())), strict=True).comm_bytes > 0


def test_sums_of_split_contractions_are_allowed():
    summed = plan(
        lambda a, b: a @ b,
        (P(None, "data"), P("data")),
        (X, jax.ShapeDtypeStruct((8, 4), jnp.float32)),
        strict=True,
    )
    assert [c.kind for c in summed.collectives] == ["all_reduce"]


def test_large_gathers_are_refused():
    assert refusal(max_gather_bytes=511) == (
        "Options(strict=False, max_gather_bytes=511, allow=()) refuses:\n  all_gather over data of f32[32] "
        "at tests/test_strict.py:LINE makes an array of 512 bytes on each device, because of fft in "
        "P(None); max_gather_bytes=511. Split it otherwise, raise the limit, or allow it: "
        "Options(allow=('*/test_strict.py:23',))"
    )
    assert plan(max_gather_bytes=512).comm_bytes > 0
    assert plan(max_gather_bytes=0, allow=("*/test_strict.py:23",)).comm_bytes > 0


def test_large_gathers_that_annotations_ask_for_are_refused_too():
    with pytest.raises(
        ValueError, match="makes an array of 512 bytes on each device, because of annotate in"
    ):
        plan(lambda x: sx.annotate(x, P()) * 2, max_gather_bytes=100)


def test_the_whole_array_of_a_chain_of_gathers_counts():
    with pytest.raises(ValueError, match="512 bytes"):
        plan(spectrum, P(("data", "model")), max_gather_bytes=511)


def test_large_gathers_warn():
    with pytest.warns(UserWarning, match="makes an array of 512 bytes"):
        plan(max_gather_bytes=511, strict="warn")


def without_rule(name):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    return primitive.bind


def test_primitives_without_a_rule():
    fun = without_rule("unknown_op")
    with pytest.warns(
        UserWarning, match=r"unknown_op at .*:\d+ has no sharding rule.* Options\(allow=\('unknown_op',\)\)"
    ):
        plan(lambda x: fun(x))
    with pytest.raises(
        ValueError, match="has no sharding rule: it runs replicated, each device sends 384 bytes"
    ):
        plan(lambda x: fun(x), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(lambda x: fun(x), strict=True, allow=("unknown_op",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strict": "refuse"}, 'must be False, "warn" or True'),
        ({"max_gather_bytes": -1}, "must be a number of bytes, or None"),
        ({"max_gather_bytes": 1.5}, "must be a number of bytes, or None"),
        ({"allow": "sort"}, "must be a tuple of patterns"),
        ({"allow": (1,)}, "must be a tuple of patterns"),
        ({"idle_axes": 1}, 'must be True, "near" or False'),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sx.Options(**options)


def conflicting(x):
    y = sx.annotate(jnp.sin(x), P("data"))
    z = jax.lax.with_sharding_constraint(y, P(None, "data"))
    return (z * 2).sum()


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "f",
    [
        conflicting,
        jax.grad(conflicting),
        lambda x: jax.lax.scan(lambda c, _: (c + conflicting(x), None), 0.0, None, 2),
    ],
)
def test_conflicting_annotations_of_one_value(f):
    """Both places are named. Where something is computed between, or reads the first, each has its use."""
    x = jnp.ones((8, 16))
    with pytest.raises(sx.Refused) as caught:
        sx.shard_jit(f, mesh=MESH, options=sx.Options(strict=True)).plan(x)
    both = re.search(
        r" (\w+) at .*test_strict.py:(\d+) asks for (.*), and (\w+) at .*:(\d+) for (.*), of one value",
        str(caught.value),
    )
    assert both
    (one, first, wanted), (other, second, last) = sorted(
        (both.groups()[:3], both.groups()[3:])
    )  # backward they are turned
    assert (one, other, int(second)) == ("annotate", "with_sharding_constraint", int(first) + 1)
    assert (wanted, last) == ("P('data', None)", "P(None, 'data')")
    sx.shard_jit(f, mesh=MESH, options=sx.Options(strict=True, allow=(f"*/test_strict.py:{first}",))).plan(x)
    sx.shard_jit(f, mesh=MESH).plan(x)


@pytest.mark.not_quick
def test_annotations_that_do_not_conflict_are_accepted():
    def f(x):
        y = sx.annotate(sx.annotate(x, P("data", P.UNCONSTRAINED)), P("data", "model"))
        z = sx.annotate(jnp.sin(y), P("data"))
        return sx.annotate(z, P(None, "data")) + z, sx.annotate(x, P())

    sx.shard_jit(
        f, mesh=MESH, in_shardings=P("model"), out_shardings=P(), options=sx.Options(strict=True)
    ).plan(jnp.ones((8, 16)))


@pytest.mark.parametrize("allow", [(), ("sort",), ("all_*",), ("*/test_strict.py:*",)])
def test_what_is_allowed_is_chosen_as_if_it_were_not_strict(allow):
    """A short row is cheaper gathered than sorted in blocks, which strict mode does where it may not be
    gathered.
    """
    short = (jax.ShapeDtypeStruct((64,), jnp.float32),)
    chosen, free = (
        plan(lambda x: jnp.sort(x), args=short, **how) for how in ({"strict": True, "allow": allow}, {})
    )
    assert {c.kind for c in free.collectives} == {"all_gather"}
    assert ([str(c) for c in chosen.collectives] == [str(c) for c in free.collectives]) == bool(allow)

"""What the ledger says of programs written by hand, and that the lowered and the compiled program say the
same.
"""

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardax.explain import hlo
from shardax.ledger.collectives import AS_WRITTEN, Collective, array_text, bytes_sent, collectives, comm_bytes

pytestmark = pytest.mark.quick

SIZES = {"x": 4, "y": 2}
ABSTRACT = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
KIB = 1024  # a float32[16, 16]


def on_shards(body, *shapes, check_vma=False, mesh=None):
    """`body` on shards of these shapes, and its arguments; shards differ along both axes, and so do the
    results.
    """
    specs = tuple(P(("x", "y")) if shape else P() for shape in shapes)
    mesh = mesh or jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(("x", "y")), check_vma=check_vma)
    return f, [jax.ShapeDtypeStruct((8 * s[0], *s[1:]) if s else (), jnp.float32) for s in shapes]


def ledger(body, *shapes, **kwargs) -> tuple[Collective, ...]:
    f, args = on_shards(body, *shapes, mesh=ABSTRACT, **kwargs)
    return collectives(jax.make_jaxpr(f)(*args), SIZES)


def sent(found):
    return [(c.kind, c.axes, c.nbytes, c.trips) for c in found]


def all_reduce_both(v):
    return lax.psum(v, ("x", "y"))


def ring(v):
    return lax.ppermute(v, "x", [(i, (i + 1) % 4) for i in range(4)])


def self_sends(v):
    return lax.ppermute(v, "x", [(i, i) for i in range(4)]) * 1


def one_sends(v):
    return lax.ppermute(v, ("x", "y"), [(0, 1), (2, 2)])


def scattered(v):
    return lax.psum_scatter(v, "x", scatter_dimension=0, tiled=True)


def gathered(v):
    return lax.all_gather(v, "y", axis=1, tiled=True)


def stacked(v):
    return lax.all_gather(v, "y")


def exchanged(v):
    return lax.all_to_all(v, "x", split_axis=0, concat_axis=1, tiled=True)


BYTES = [
    (lambda v: lax.psum(v, "x"), [("all_reduce", ("x",), 1536, 1)]),
    (all_reduce_both, [("all_reduce", ("x", "y"), 1792, 1)]),
    (lambda v: lax.pmax(v, "y"), [("all_reduce", ("y",), KIB, 1)]),
    (lambda v: lax.pmin(v, "y"), [("all_reduce", ("y",), KIB, 1)]),
    (gathered, [("all_gather", ("y",), KIB, 1)]),
    (stacked, [("all_gather", ("y",), KIB, 1)]),
    (scattered, [("reduce_scatter", ("x",), 768, 1)]),
    (exchanged, [("all_to_all", ("x",), 768, 1)]),
    (ring, [("ppermute", ("x",), KIB, 1)]),
    (one_sends, [("ppermute", ("x", "y"), KIB, 1)]),
    (self_sends, []),
    (lambda v: v * 2, []),
]


@pytest.mark.parametrize(("body", "expected"), BYTES)
def test_bytes(body, expected):
    assert sent(ledger(body, (16, 16))) == expected


@pytest.mark.not_quick
@pytest.mark.parametrize("body", [body for body, _ in BYTES])
def test_bytes_agree_with_stablehlo(body):
    agrees_with_stablehlo(body, (16, 16))


def test_invariant_types_count_alike():
    def body(v):
        return v + lax.psum(v.sum(), ("x", "y"))

    (found,) = ledger(body, (16, 16), check_vma=True)
    assert sent([found]) == [("all_reduce", ("x", "y"), 7, 1)]


def test_axes_of_size_one_send_nothing():
    mesh = AbstractMesh((8, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    f, args = on_shards(
        lambda v: lax.psum(lax.all_gather(v, "y", tiled=True), ("x", "y")), (16, 16), mesh=mesh
    )
    assert sent(collectives(jax.make_jaxpr(f)(*args), mesh.shape)) == [("all_reduce", ("x", "y"), 1792, 1)]


def test_uneven_bytes_are_rounded_up():
    assert bytes_sent("all_reduce", 4, 5) == 7


def test_psum_of_several_operands_is_one_collective():
    jaxpr = jax.make_jaxpr(lambda v, w: lax.psum((v, w), "x"), axis_env=[("x", 4)])(
        jax.ShapeDtypeStruct((16,), "float32"), jax.ShapeDtypeStruct((2, 16), "float32")
    )
    first, second = jaxpr.eqns
    both = first.replace(invars=first.invars + second.invars, outvars=first.outvars + second.outvars)
    (found,) = collectives(jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=[both])), {"x": 4})
    assert found.nbytes == 96 + 192
    assert (found.shape, found.dtype) == ((16,), jnp.float32)
    assert str(found) == "all_reduce over x of f32[16], f32[2,16]: as written"
    assert hlo.counts([found]) == {("all_reduce", 4, 64, ""): 1, ("all_reduce", 4, 128, ""): 1}


def scan(v):
    return lax.scan(lambda c, x: (c + lax.psum(x, "x"), None), v, jnp.ones((5, *v.shape)))[0]


def unrolled_scan(v):
    return lax.scan(lambda c, x: (c + lax.psum(x, "x"), None), v, jnp.ones((5, *v.shape)), unroll=2)[0]


def empty_scan(v):
    return lax.scan(lambda c, x: (c + lax.psum(x, "x"), None), v, jnp.ones((0, *v.shape)))[0]


def scan_in_scan(v):
    return lax.scan(lambda c, _: (scan(c), None), v, None, length=3)[0]


def nested_jit(v):
    twice = jax.jit(lambda w: lax.psum(w, "x") + lax.psum(2 * w, "x"))
    return twice(v) + twice(v + 1)


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("body", "trips"), [(scan, [5]), (unrolled_scan, [5]), (empty_scan, []), (scan_in_scan, [15])]
)
def test_scans_multiply(body, trips):
    found = ledger(body, (16, 16))
    assert sent(found) == [("all_reduce", ("x",), 1536, n) for n in trips]
    assert comm_bytes(found) == 1536 * sum(trips)
    agrees_with_stablehlo(body, (16, 16))


@pytest.mark.not_quick
def test_calls_count_each_time():
    assert sent(ledger(nested_jit, (16, 16))) == [("all_reduce", ("x",), 1536, 1)] * 4
    agrees_with_stablehlo(nested_jit, (16, 16))


def while_loop(v):
    return lax.while_loop(lambda c: lax.psum(c.sum(), "x") < 10, lambda c: c + scan(c), v)


@pytest.mark.not_quick
def test_a_while_loop_counts_one_iteration_and_is_marked():
    condition, body = ledger(while_loop, (16, 16))
    assert sent([condition, body]) == [("all_reduce", ("x",), 6, 1), ("all_reduce", ("x",), 1536, 5)]
    assert condition.open_loop and body.open_loop
    agrees_with_stablehlo(while_loop, (16, 16))


def counted(start, bound, step):
    def f(v):
        return lax.while_loop(
            lambda c: c[0] < bound, lambda c: (c[0] + step, lax.psum(c[1], "x")), (start, v)
        )[1]

    return f


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("loop", "trips"), [((0, 5, 1), 5), ((2, 9, 3), 3), ((4, 4, 1), None), ((9, 2, 1), None)]
)
def test_a_while_loop_that_counts_to_a_constant_multiplies(loop, trips):
    found = ledger(counted(*loop), (16, 16))
    assert [(c.trips, c.open_loop) for c in found] == ([(trips, False)] if trips else [])
    agrees_with_stablehlo(counted(*loop), (16, 16))


@pytest.mark.not_quick
def test_a_while_loop_that_counts_otherwise_is_open():
    def to_argument(v):
        return lax.while_loop(lambda c: c[0] < v.size, lambda c: (c[0] * 2, lax.psum(c[1], "x")), (1, v))[1]

    def from_argument(v):
        return lax.while_loop(
            lambda c: c[0] < 5, lambda c: (c[0] + 1, lax.psum(c[1], "x")), (v[0, 0].astype(int), v)
        )[1]

    for f in (to_argument, from_argument):
        assert [c.open_loop for c in ledger(f, (16, 16))] == [True]
        agrees_with_stablehlo(f, (16, 16))


def branches(v):
    def dear(w):
        return lax.psum(w, "x")

    def cheap(w):
        return lax.psum(w[:1], "x") + w

    return scan(lax.cond(v[0, 0] > 0, dear, cheap, v))


@pytest.mark.not_quick
def test_of_a_cond_the_dearest_branch_counts():
    cheap, dear, after = ledger(branches, (16, 16))
    assert (cheap.nbytes, cheap.other_branch, cheap.total) == (96, True, 0)
    assert (dear.nbytes, dear.other_branch, dear.total) == (1536, False, 1536)
    assert comm_bytes([cheap, dear, after]) == 6 * 1536
    agrees_with_stablehlo(branches, (16, 16))


def three_branches(v):
    return lax.switch(v[0, 0].astype(int), [lambda w: w, ring, lambda w: ring(ring(w))], v)


@pytest.mark.not_quick
def test_the_first_of_equal_branches_counts():
    def equal(v):
        return lax.cond(v[0, 0] > 0, ring, lambda w: ring(w + 1), v)

    assert [c.other_branch for c in ledger(equal, (16, 16))] == [False, True]
    agrees_with_stablehlo(equal, (16, 16))
    agrees_with_stablehlo(three_branches, (16, 16))


def agrees_with_stablehlo(body, *shapes):
    f, args = on_shards(body, *shapes)
    expected = hlo.counts(collectives(jax.make_jaxpr(f)(*args), SIZES))
    assert hlo.counts(hlo.lowered(jax.jit(f).lower(*args).compiler_ir())) == expected


@pytest.mark.promotes_ranks
@pytest.mark.not_quick
def test_random_keys_and_other_dtypes_agree_with_stablehlo():
    def body(v):
        keys = lax.all_gather(jax.random.split(jax.random.key(0), 4), "x", tiled=True)
        flags = lax.all_gather(v > 0, "y", tiled=True)
        sums = [
            jnp.abs(lax.psum(v.astype(dtype), "x")).astype(v.dtype)
            for dtype in (jnp.bfloat16, jnp.int8, jnp.complex64)
        ]
        return sum(sums, v) + jax.random.bits(keys[5]).astype(v.dtype) + flags[0].astype(v.dtype)

    texts = [array_text(c.operands[0]) for c in ledger(body, (2, 2))]
    assert texts == ["key<fry>[4]", "bool[2,2]", "bf16[2,2]", "i8[2,2]", "c64[2,2]"]
    agrees_with_stablehlo(body, (2, 2))


def test_line_and_reason():
    def body(v):
        with (
            jax.named_scope("layer"),
            jax.named_scope("all_reduce[sum of dot_general, at rest in P(None, 'x')]"),
        ):
            return lax.psum(v, "x")  # here

    def looped(v):
        return lax.scan(lambda c, _: (body(c), None), v, None, length=2)[0]

    here = next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# here")
    )
    for f in (body, jax.jit(body), looped):
        (found,) = ledger(f, (16, 16))
        assert found.reason == "sum of dot_general, at rest in P(None, 'x')"
        assert found.line == f"{__file__}:{here}"


def test_a_scope_of_another_kind_is_no_reason():
    def body(v):
        with jax.named_scope("all_gather[not this]"):
            return lax.psum(v, "x")

    assert ledger(body, (16, 16))[0].reason == AS_WRITTEN


@pytest.mark.not_quick
@pytest.mark.parametrize("body", [gathered, ring, exchanged, all_reduce_both, one_sends])
def test_compiled_for_cpu(body):
    f, args = on_shards(body, (16, 16))
    text = jax.jit(f).lower(*args).compile().as_text()
    assert hlo.counts(hlo.compiled(text)) == hlo.counts(ledger(body, (16, 16)))


@pytest.mark.not_quick
def test_compiled_reductions_are_combined():
    def body(v, w):
        return lax.psum(v, "x") + lax.psum(w, "x")[:1]

    f, args = on_shards(body, (16, 16), (16, 16))
    text = jax.jit(f).lower(*args).compile().as_text()
    assert len(re.findall(r" all-reduce\(", text)) == 1
    assert hlo.counts(hlo.compiled(text)) == Counter({("all_reduce", 4, KIB, ""): 2})


ASYNC = """\
HloModule jit_f, num_partitions=8

%wrapped (p: f32[2,128]) -> f32[8,128] {
  %p = f32[2,128]{1,0:T(2,128)} parameter(0)
  ROOT %g = f32[8,128]{1,0:T(8,128)} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

%overlapped.1 (p.1: bf16[256]) -> bf16[512] {
  %p.1 = bf16[256]{0:T(256)} parameter(0)
  ROOT %g.1 = bf16[512]{0} all-gather(%p.1), replica_groups={{0,1},{2,3}}, frontend_attributes={chain_id="0"}
}

%overlapped.2 (p.2: bf16[256]) -> bf16[512] {
  %p.2 = bf16[256]{0:T(256)} parameter(0)
  ROOT %g.2 = bf16[512]{0} all-gather(%p.2), replica_groups={{0,1},{2,3}}, frontend_attributes={chain_id="0"}
}

ENTRY %main (a: f32[2,128], b: bf16[64]) -> f32[8,128] {
  %a = f32[2,128]{1,0:T(2,128)S(1)} parameter(0)
  %b = bf16[64]{0:T(256)(128)(2,1)} parameter(1)
  %s = ((f32[2,128]{1,0:T(2,128)}), f32[8,128]{1,0}, u32[]) async-start(%a), calls=%wrapped
  %ars = (f32[2,128]{1,0}, bf16[64]{0}) all-reduce-start(%a, %b), channel_id=2, replica_groups={}, to_apply=%add
  %ard = (f32[2,128]{1,0}, bf16[64]{0}) all-reduce-done(%ars)
  %ps = (f32[2,128]{1,0}, f32[2,128]{1,0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{2,2}}
  %pd = f32[2,128]{1,0} collective-permute-done(%ps)
  ROOT %d = f32[8,128]{1,0} async-done(%s)
}
"""


def test_asynchronous_instructions_count_once():
    assert hlo.counts(hlo.compiled(ASYNC)) == {
        ("all_gather", 4, KIB, ""): 1,
        ("all_gather", 2, 512, ""): 1,
        ("all_reduce", 8, KIB, ""): 1,
        ("all_reduce", 8, 128, ""): 1,
        ("ppermute", 1, KIB, ""): 1,
    }

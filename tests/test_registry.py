"""Rules that are registered: what is refused when, and what a primitive without one costs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir.dialects import stablehlo

import shardax as sx
from shardax import _jax
from shardax.check.samples import SAMPLES
from shardax.completion.edges import ELEMENTWISE, edges_of
from shardax.graph.inline import from_jaxpr
from shardax.program import build
from shardax.rewrites.numbering import Numbers
from shardax.sharding import Sharding
from shardax.spmd_rules.maps import REDUCED, Carry, carries_of_map
from shardax.spmd_rules.registry import RULES
from tests.graphs import graph

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X = np.ones((8, 4), "float32")
double_p = Primitive("double")
double_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(double_p, lambda ctx, x: [stablehlo.AddOp(x, x).result])  # nothing to look into


def _step(**options):
    return sx.shard_jit(
        lambda x: double_p.bind(x) + 1, mesh=MESH, in_shardings=P("x"), options=sx.Options(**options)
    )


@pytest.fixture(autouse=True)
def registered():
    yield
    RULES.pop("double", None)


AT_REGISTRATION = [
    ("a b", "at '->': a rule has operands, an arrow '->' and results"),
    ("a ? -> a", "at '?': expected a factor"),
    ("a+ -> a+", "at 'a': a reduced factor cannot appear in a result"),
    ("a+ b, a -> b", "at 'a': the factor 'a' was marked as sum before"),
    ("(a b -> a b", "at '(': this parenthesis is not closed"),
    ("a (b~ c) -> a", "at 'b~': a windowed factor must have a dim to itself"),
    ("... ... -> ...", "at '...': a tensor has at most one"),
    ("a b -> a b, a", "at '->': it has 2 results, double has one"),
    ("a -> a -> a", "at '->': a rule has one arrow"),
    ("a b:sum, a -> a", "at ':sum': expected a factor"),
    (
        "a k -> a",
        "at 'k': no result has it: mark it k+ (k:max, k:min) if results are reduced over it, k! if it must "
        "be unsplit",
    ),
    (
        "a -> a n",
        "at 'n': no operand has it, so nothing is computed in parts along it: mark it n!; or give `local`",
    ),
    ("a ... -> a", "at '...': only operands have it: name the dims; or give `local`"),
    ("a~ -> a~", "at 'a~': a windowed factor needs what neighbours have: give `local`, which sends it"),
]


@pytest.mark.parametrize("rule, why", AT_REGISTRATION)
def test_refused_at_registration(rule, why):
    with pytest.raises(ValueError) as error:
        sx.register_rule(double_p, rule)
    assert str(error.value).startswith(f"rule {rule!r}: {why}")
    assert "double" not in RULES


def test_a_lowering_may_have_factors_on_one_side():
    sx.register_rule(double_p, "a k -> a", lambda local, x: [x.sum(1)])
    assert "double" in RULES


PARTS = [
    (
        dict(passes=(sx.LINEAR(1),)),
        "passes of register_rule names operand 1, the rule 'a b -> a b' has 1: count from 0",
    ),
    (
        dict(in_place=(0, 2)),
        "in_place of register_rule names place 2, the rule 'a b -> a b' has 2 operands and results",
    ),
]


@pytest.mark.parametrize("parts, why", PARTS)
def test_parts_that_contradict_the_rule(parts, why):
    with pytest.raises(ValueError) as error:
        sx.register_rule(double_p, "a b -> a b", **parts)
    assert str(error.value).startswith(why)
    sx.register_rule(double_p, lambda node: "a b -> a b", **parts)
    with pytest.raises(ValueError, match=r"double at .*test_registry.py:\d+: ") as error:
        _step().plan(X)
    assert why in str(error.value)


FUNCTIONS = [
    (
        dict(rule=lambda node: None),
        "what the function that is its rule gives is None, of type NoneType: give text",
    ),
    (dict(rule=lambda node: "a n -> a k"), "rule 'a n -> a k': at 'k': no operand has it"),
    (
        dict(passes=lambda node: [sx.LINEAR(3)]),
        "a sequence of LINEAR(...) and MOVES(...), of operands below 1",
    ),
    (
        dict(sends=lambda local: 4096),
        "gives is 4096, of type int: give (kind, axes, bytes) of each collective, such as [('all_gather', ('x',), "
        "4096)], or its bytes alone",
    ),
    (
        dict(sends=lambda local: [("all_gather", ("rows",), 4096)]),
        "gives is [('all_gather', ('rows',), 4096)], of type list: give (kind, axes, bytes) of each collective",
    ),
    (
        dict(flops=lambda params, ins, outs: -1),
        "gives is -1, of type int: give the FLOPs that one device does, such as",
    ),
    (
        dict(flops=lambda params, ins, outs: [8]),
        "gives is [8], of type list: give the FLOPs that one device does, such as",
    ),
    (
        dict(batch=lambda params, ins, outs: 2.5),
        "what `batch` of double at",
    ),
    (
        dict(ways=lambda candidates, padding: None),
        "gives is None, of type NoneType: give those of the candidates",
    ),
    (dict(local=lambda local, x: x), "give a list with a shard for each result"),
    (
        dict(local=lambda local, x: [x, x]),
        "gives float32[2, 4], float32[2, 4], where it promises float32[2, 4]: mark what",
    ),
    (
        dict(local=lambda local, x: [x[:1]]),
        "gives float32[1, 4], where it promises float32[2, 4]: mark what cannot be split",
    ),
    (dict(local=lambda local, x: [x > 0]), "gives bool[2, 4], where it promises float32[2, 4]"),
]


@pytest.mark.parametrize("parts, why", FUNCTIONS)
def test_what_registered_functions_give(parts, why):
    sx.register_rule(double_p, **{"rule": "a b -> a b", **parts})
    with pytest.raises(ValueError, match=r"double at .*test_registry.py:\d+") as error:
        _step().plan(X)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "parts, where",
    [
        (dict(rule=lambda node: node.params["axis"]), "in the function that is the rule of double at "),
        (dict(local=lambda local, x: [x.most]), "in the lowering of double at "),
        (
            dict(flops=lambda params, ins, outs: params["k"], local=lambda local, x: [x]),
            "in the function `flops` of double at ",
        ),
        (dict(batch=lambda params, ins, outs: params["k"]), "in the function `batch` of double at "),
    ],
)
def test_what_registered_functions_raise_says_where(parts, where):
    sx.register_rule(double_p, **{"rule": "a b -> a b", **parts})
    with pytest.raises((KeyError, AttributeError)) as error:
        _step().plan(X)
    assert any(note.startswith(where) for note in error.value.__notes__)


def test_another_rule_in_its_place():
    """What is compiled by the old one is forgotten."""
    sx.register_rule(double_p, "a! b -> a! b")
    step = sx.shard_jit(lambda x: double_p.bind(x), mesh=MESH, in_shardings=P("x"), out_shardings=P("x"))
    np.testing.assert_array_equal(step(X), 2 * X)
    assert [c.kind for c in step.plan(X).collectives] == ["all_gather"]
    sx.register_rule(double_p, "a b -> a b", lambda local, x: [x * 3])
    assert not step.plan(X).collectives
    np.testing.assert_array_equal(step(X), 3 * X)


AT_USE = [
    ("a b, a b -> a b", "at '->': it has 2 operands, the equation has 1"),
    ("a -> a", "at 'a': it names 1 dims, the shape is (8, 4)"),
    ("a! b -> b b", "at 'b': this factor has size 4 in one place and 8 in another"),
    ("a a -> a a", "at 'a': this factor has size 8 in one place and 4 in another"),
    ("(a b) c -> (a b) c", "at '(a b)': its factors do not multiply to the dim's size 8"),
]


@pytest.mark.parametrize("rule, why", AT_USE)
def test_what_shapes_contradict_is_refused_with_the_line(rule, why):
    sx.register_rule(double_p, rule)
    with pytest.raises(ValueError, match=r"double at .*test_registry.py:\d+: rule ") as error:
        _step().plan(X)
    assert f"rule {rule!r}: {why}" in str(error.value)


def test_no_rule_is_one_priced_warning_or_refused():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(_step()(X), 2 * X + 1)
    words = [str(w.message) for w in said if "double" in str(w.message)]
    assert len(words) == 1 and "no sharding rule: it runs replicated, each device sends 96 bytes" in words[0]
    assert "test_registry.py:" in words[0]
    with pytest.raises(
        sx.Refused, match=r"double at .* Register one, shardax.register_rule\('double', ...\)"
    ):
        _step(strict=True).plan(X)
    sx.register_rule(double_p, "... -> ...")
    assert not _step(strict=True).plan(X).collectives


def test_results_by_the_number():
    """Of a primitive that is named only, and of one of several results, the number is not known before it is
    used.
    """
    sx.register_rule("double", "a b -> a b, a")
    with pytest.raises(ValueError, match="it has 2 results, the equation has 1"):
        _step().plan(X)


def _potrf(x):
    """A kernel of jaxlib's for CPUs: the Cholesky factor, and whether there is one."""
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], "int32")
    return jax.ffi.ffi_call("lapack_spotrf_ffi", results)(x, uplo=np.uint8(ord("L")))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel for CPUs")
def test_kernels_of_others_are_whole_or_under_a_rule():
    jax.numpy.linalg.cholesky(jax.numpy.eye(2))  # jaxlib looks for LAPACK when JAX first needs it
    x = np.tile(np.eye(3, dtype="float32") * 4 + 1, (8, 1, 1))
    wanted = jax.jit(_potrf)(x)
    with pytest.warns(
        UserWarning,
        match=r"ffi_call at .*test_registry.py:\d+ has no sharding rule: .* sends 216 bytes .*partition_as",
    ):
        got = sx.shard_jit(_potrf, mesh=MESH, in_shardings=P("x"))(x)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    by_rows = sx.shard_jit(sx.partition_as("b i! j! -> b i! j!, b")(_potrf), mesh=MESH, in_shardings=P("x"))
    jax.tree.map(np.testing.assert_array_equal, by_rows(x), wanted)
    assert not by_rows.plan(x).collectives


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_random_bits_inside_islands(impl):
    def inside(key, x):
        key = jax.random.fold_in(key, jax.lax.axis_index("x"))
        return (
            x + jax.random.normal(key, x.shape),
            jax.random.bits(key, (3,), "uint8"),
            jax.random.split(key, 2),
        )

    def f(data, x):
        key = jax.random.wrap_key_data(data, impl=impl)
        island = jax.shard_map(inside, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=False)
        x, bits, keys = island(key, x)
        return x, bits, jax.random.key_data(keys), jax.random.uniform(key, (6, 5))

    data = jax.random.key_data(jax.random.key(3, impl=impl))
    got = sx.shard_jit(f, mesh=MESH, in_shardings=(None, P("x")))(data, X)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(f)(data, X))


def _cube(params, in_shapes, out_shapes):
    (rows, _), (_, columns) = in_shapes[0], out_shapes[0]
    return 1000 * rows * columns


@pytest.mark.parametrize("local", [None, lambda local, x: [x * 2]])
def test_flops_of_a_users_primitive_count(local):
    """Those of shards; also where the lowering does not show them."""
    sx.register_rule(double_p, "a b -> a b", local, flops=_cube)
    scanned = lambda x: jax.lax.scan(lambda c, _: (double_p.bind(c) + 1, None), x, None, length=3)[0]  # noqa: E731
    plan = _step().plan(X)
    assert plan.estimate("v5e").flops == 1000 * 2 * 4
    assert (
        sx.shard_jit(scanned, mesh=MESH, in_shardings=P("x")).plan(X).estimate("v5e").flops
        == 3 * 1000 * 2 * 4
    )
    (found,) = ((n, d) for n, d in plan_decisions(lambda x: double_p.bind(x) + 1) if n.name == "double")
    assert RULES["double"].has_flops(found[0])
    assert RULES["double"].flops_of(found[1].local(found[0], {"x": 4, "y": 2})) == 1000 * 2 * 4


def plan_decisions(f):
    """The nodes of a program of `X`, its rows split over x, with their decisions."""
    return build(jax.make_jaxpr(f)(X), (Sharding((("x",), ())),), MESH.abstract_mesh).decisions.pairs()


def test_flops_that_are_none():
    """An equation may have no products, though others of its primitive do."""
    sx.register_rule(double_p, "a b -> a b", flops=lambda params, ins, outs: None)
    ((node, decision), *_) = [
        pair for pair in plan_decisions(lambda x: double_p.bind(x)) if pair[0].name == "double"
    ]
    assert not RULES["double"].has_flops(node)
    assert RULES["double"].flops_of(decision.local(node, {"x": 4, "y": 2})) == 0
    assert _step().plan(X).estimate("v5e").flops == 0


MULTIPLY = """
    cholesky conv_general_dilated dot_general eig eigh fft hessenberg householder_product lu qr
    ragged_dot_general schur svd symmetric_product triangular_solve tridiagonal
""".split()


@pytest.mark.parametrize("name", MULTIPLY)
def test_what_multiplies_has_flops(name):
    """In proportion to the batch, or to the rows."""
    f, *args = SAMPLES[name]
    assert _flops(f, *args, only=name) > 0
    if name not in ("conv_general_dilated", "dot_general", "ragged_dot_general"):
        twice = [np.concatenate([x, x]) for x in args]
        assert _flops(f, *twice, only=name) == pytest.approx(2 * _flops(f, *args, only=name))


def test_nothing_else_has_flops():
    others = (
        "geqp3 geqrf ormqr partition_as scaled_matmul scaled_matmul_wrapper".split()
    )  # no public function makes them here
    assert {name for name, entry in RULES.items() if entry.flops} == {*MULTIPLY, *others}


def _flops(f, *args, only=None) -> float:
    nodes = from_jaxpr(_jax.dce(jax.make_jaxpr(f)(*args))).walk()
    counted = ((RULES[n.name], n) for n in nodes if n.name in RULES and only in (None, n.name))
    return sum(e.flops(n.params, n.in_shapes, n.out_shapes) or 0 for e, n in counted if e.flops)


def _conv(*, groups=1, batches=1, dilated=1, padding=((0, 0), (0, 0)), **params):
    names = ("NHWC", "HWIO", "NHWC")
    given = dict(lhs_dilation=(dilated, dilated), feature_group_count=groups, batch_group_count=batches)
    given |= {"window_strides": (1, 1), "padding": padding, "dimension_numbers": names, **params}
    return lambda x, k: jax.lax.conv_general_dilated(x, k, **given)


def _squared(f):
    return lambda x, k: (f(x, k) ** 2).sum()


IMAGES, KERNEL, OF_ONE = ((2, 64, 64, 3), (3, 3, 3, 6), (3, 3, 1, 6))
STRIDED = _conv(window_strides=(2, 2), padding="SAME")
PRODUCTS = {
    "matrices": (jnp.matmul, (4, 32, 16), (4, 16, 64)),
    "einsum": (lambda a, b: jnp.einsum("bij,bkj->ki", a, b), (4, 32, 16), (4, 64, 16)),
    "gradients": (jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1)), (32, 16), (16, 64)),
    "conv": (_conv(), IMAGES, KERNEL),
    "strides": (STRIDED, IMAGES, KERNEL),
    "transposed": (_conv(dilated=2), IMAGES, KERNEL),
    "spread": (_conv(rhs_dilation=(2, 2)), IMAGES, KERNEL),
    "feature groups": (_conv(groups=3), IMAGES, OF_ONE),
    "batch groups": (_conv(batches=2), IMAGES, KERNEL),
    "gradients of strides": (jax.grad(_squared(STRIDED), (0, 1)), IMAGES, KERNEL),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers count otherwise")
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_that_xla_counts(name):
    f, *shapes = PRODUCTS[name]
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    counted = jax.jit(f).lower(*args).compile().cost_analysis()["flops"]
    assert _flops(f, *args) == pytest.approx(counted, rel=0.1)


# Facts


def binary(name):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, y: x)
    return primitive


@pytest.fixture
def registering():
    """Registers rules, and forgets them."""
    names = []

    def register(primitive, *rule, **facts):
        names.append(primitive if isinstance(primitive, str) else primitive.name)
        sx.register_rule(primitive, *rule, **facts)

    yield register
    for name in names:
        RULES.pop(name, None)


def test_a_loop_that_accumulates_by_a_primitive_of_the_user_is_a_map(registering):
    accumulate_p, passes_p = binary("accumulate"), Primitive("passes")
    passes_p.def_abstract_eval(lambda x: x)

    def carries():
        trip = lambda c, x: (passes_p.bind(accumulate_p.bind(x, c)), None)  # noqa: E731
        return carries_of_map(graph(lambda c, xs: lax.scan(trip, c, xs), (4,), (3, 4)).nodes[-1])

    assert carries() is None
    registering(accumulate_p, "..., ... -> ...", accumulates=("max", (1,)))
    assert carries() is None
    registering(passes_p, "... -> ...", passes=(sx.MOVES(0),))
    assert carries() == (Carry(REDUCED, "max"),)
    registering(accumulate_p, "..., ... -> ...", accumulates=("max", (1,)), once=True)
    assert carries() is None


def numbered_alike(f, *shapes):
    program = graph(f, *shapes)
    one, other = map(Numbers(program).number, program.outputs)
    return one == other


def test_equal_computations_by_primitives_of_the_user(registering):
    meet_p, flip_p = binary("meet"), Primitive("flip")
    flip_p.def_abstract_eval(lambda x: x.update(shape=x.shape[::-1]))
    exchanged = lambda x, y: (meet_p.bind(x, y), meet_p.bind(y, x))  # noqa: E731
    flipped = lambda x: (jnp.sin(x[:1]), flip_p.bind(jnp.sin(x[:1])))  # noqa: E731
    twice = lambda x, y: (meet_p.bind(x, y), meet_p.bind(x, y))  # noqa: E731
    registering(meet_p, "..., ... -> ...")
    assert not numbered_alike(exchanged, (4,), (4,)) and numbered_alike(twice, (4,), (4,))
    registering(meet_p, "..., ... -> ...", commutes=True)
    assert numbered_alike(exchanged, (4,), (4,))
    registering(meet_p, "..., ... -> ...", anew=True)
    assert not numbered_alike(twice, (4,), (4,))
    registering(flip_p, "a b -> b a")
    assert not numbered_alike(flipped, (4, 8))
    registering(flip_p, "a b -> b a", passes=(sx.MOVES(0),))
    assert numbered_alike(flipped, (4, 8))


def test_shardings_go_through_what_is_of_parts_first(registering):
    join_p = binary("join")
    join_p.def_abstract_eval(lambda x, y: x.update(shape=(x.shape[0] + y.shape[0], *x.shape[1:])))
    (node,) = graph(join_p.bind, (4, 8), (4, 8)).nodes

    def levels():
        return {(edge.backward, edge.forward) for edge in edges_of(node)}

    registering(join_p, "c! k, c! k -> d! k", lambda local, x, y: [lax.concatenate((x, y), 0)])
    before = levels()
    registering(join_p, "c! k, c! k -> d! k", lambda local, x, y: [lax.concatenate((x, y), 0)], of_parts=True)
    assert levels() == {(ELEMENTWISE, ELEMENTWISE)} != before


@pytest.mark.parametrize(
    "f, shape, order",
    [
        (jnp.transpose, (4, 1, 8), [2, 0]),
        (lambda x: x[:, None], (4, 8), [0, 1]),
        (lambda x: x.reshape(8, 4), (4, 8), None),
        (lambda x: x.sum(1), (4, 1, 8), [0, 2]),
        (lambda x: x.sum(1), (4, 8), None),
        (lambda x: x[::-1], (4, 8), None),
        (jnp.sin, (4, 8), None),
    ],
)
def test_the_order_of_dims_in_which_elements_stay(f, shape, order):
    (node,) = graph(f, shape).nodes
    assert RULES[node.name].order(node) == order

"""What the search chooses for whole programs."""

import itertools
import math
import time
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import ramp
from shardax.completion.complete import complete
from shardax.cost.chips import NOMINAL
from shardax.cost.network import PICO, Network
from shardax.graph import inline
from shardax.partition.alternatives import Alternatives
from shardax.partition.choose import choose, memory
from shardax.partition.copies import copies_of, is_cut
from shardax.partition.search import Search
from shardax.sharding import Layout, Sharding, replicated_layout
from shardax.spmd_rules.registry import RULES
from tests.graphs import graph
from tests.test_traffic import MESH, ROWS

SHARED = ["recurrence", "x.at[i].mul", "map", "rotate half", "more lookups than rows", "argmax"]


def sharded(name, **how):
    f, _, ins, outs, _ = ROWS[name]
    return sx.shard_jit(f, mesh=MESH, in_shardings=ins, out_shardings=outs, **how)


@cache
def alone(name):
    """The bytes that each device sends in a program by itself."""
    return sharded(name).plan(*ROWS[name][1]).comm_bytes


def beside(*names):
    """The same of two programs in one."""
    (f, fs, f_ins, f_outs, _), (g, gs, g_ins, g_outs, _) = (ROWS[name] for name in names)

    def both(xs, ys):
        return f(*xs), g(*ys)

    def specs(ins, args):
        return ins if isinstance(ins, tuple) and not isinstance(ins, P) else (ins,) * len(args)

    ins = specs(f_ins, fs), specs(g_ins, gs)
    return (
        sx.shard_jit(both, mesh=MESH, in_shardings=ins, out_shardings=(f_outs, g_outs))
        .plan(tuple(fs), tuple(gs))
        .comm_bytes
    )


@pytest.mark.once
@pytest.mark.parametrize("pair", [*itertools.combinations(SHARED, 2)], ids=" and ".join)
def test_side_by_side_programs_send_what_each_sends(pair):
    assert beside(*pair) <= sum(map(alone, pair))


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", ROWS)
def test_every_pair_sends_what_each_sends(name):
    more = {other: beside(name, other) - alone(name) - alone(other) for other in ROWS}
    assert {other: nbytes for other, nbytes in more.items() if nbytes > 0} == {}


def test_lookups_of_one_table_are_decided_apart():
    """Features of the table or batch of the indices over x: what is best for one lookup costs the other
    nothing.
    """
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    table, tokens, w = (
        jax.ShapeDtypeStruct(*s) for s in (((64, 64), "float32"), ((64,), "int32"), ((64, 64), "float32"))
    )

    def sent(f, *args, ins):
        return sx.shard_jit(f, mesh=mesh, in_shardings=ins).plan(*args).comm_bytes

    one = sent(lambda e, t: e[t] * 2, table, tokens, ins=(P(None, "x"), P("x")))
    other = sent(lambda e, t, w: e[t] @ w, table, tokens, w, ins=(P(None, "x"), P("x"), P()))
    both = sent(lambda e, t, w: (e[t] * 2, e[t] @ w), table, tokens, w, ins=(P(None, "x"), P("x"), P()))
    assert both <= one + other


def tied(table, tokens):
    return jnp.einsum("bsd,vd->bsv", jnp.sin(table[tokens]), table)


def sorted_by_the_first(keys, rows):
    return lax.sort((keys, rows), dimension=0, num_keys=1)


@pytest.mark.parametrize(
    "f, shapes, specs, cut",
    [
        (tied, [((33, 16), "float32"), ((6, 10), "int32")], lambda x, y: (P((*x, *y)), P(x), P(x)), "y"),
        (sorted_by_the_first, [((16, 10), "float32")] * 2, lambda x, y: (P(x), P(y), (P(x), P(x))), "x"),
    ],
    ids=["tied", "sort"],
)
def test_axes_cut_in_two_raise_no_price(f, shapes, specs, cut):
    """More axes are more ways, of which not all are tried: the one that splits nothing always is, and axes
    that split one dim may go to another together."""

    def price(sizes):
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        *ins, outs = specs(*(tuple(a for a in sizes if a[0] == axis) for axis in "xy"))
        step = sx.shard_jit(f, mesh=mesh, in_shardings=tuple(ins), out_shardings=outs)
        return step.plan(*(jax.ShapeDtypeStruct(*s) for s in shapes)).decisions.price

    finer = {"x": {"x1": 8, "x2": 2, "y": 8}, "y": {"x": 16, "y1": 4, "y2": 2}}
    assert price(finer[cut]) <= price({"x": 16, "y": 8}) + 1  # ties are broken by less


def named_too(spec, first="a", last="b"):
    """A spec that names two further axes, one in front of those of the first dim, one behind those of the
    last."""
    if not isinstance(spec, P):
        return spec if spec is None else tuple(map(named_too, spec))
    dims = [() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec]
    if not dims:
        return spec
    dims[0] = (first, *dims[0])
    dims[-1] = (*dims[-1], last)
    return P(*dims)


@pytest.mark.once
@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
def test_axes_of_one_device_change_nothing():
    """A configuration that names five axes, of which two have several devices, is planned as one of two."""
    mesh = AbstractMesh((1, 4, 1, 2, 1), ("a", "x", "b", "y", "c"), axis_types=(AxisType.Auto,) * 5)
    for f, args, ins, outs, _ in ROWS.values():
        plans = [
            sx.shard_jit(f, mesh=on, in_shardings=ins, out_shardings=outs).plan(*args)
            for on, ins, outs in ((MESH, ins, outs), (mesh, *map(named_too, (ins, outs))))
        ]
        wanted, found = ((p.comm_bytes, p.decisions.price, p.decisions.gap) for p in plans)
        assert found == wanted


ON_8 = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
ON_2_4 = AbstractMesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


def planned(f, mesh, ins, outs, *shapes):
    args = [
        jax.ShapeDtypeStruct(*s) if isinstance(s[0], tuple) else jax.ShapeDtypeStruct(s, "float32")
        for s in shapes
    ]
    plan = sx.shard_jit(f, mesh=mesh, in_shardings=ins, out_shardings=outs).plan(*args)
    return plan.comm_bytes, plan.decisions.price


@pytest.mark.parametrize("before", [jnp.tanh, lambda x: x + 1, lambda x: x[::-1]], ids=["tanh", "add", "rev"])
@pytest.mark.parametrize("rows, inner", [(512, 1024), (4096, 1024), (512, 4096)])
def test_what_is_computed_before_a_product_costs_it_nothing(rows, inner, before):
    """Completion splits what is reduced of both operands alike. That it need not is looked at, too."""
    ins, shapes = (P(), P("d")), ((rows, inner), (inner, 1024))
    sent, _ = planned(lambda x, w: x @ w, ON_8, ins, P("d"), *shapes)
    assert planned(lambda x, w: before(x) @ w, ON_8, ins, P("d"), *shapes)[0] <= sent


def hidden(x, w, out):
    return jnp.tanh(x @ w) @ out


def test_what_is_passed_through_costs_what_is_beside_it_nothing():
    """It may be state, by its type, and completion begins elsewhere then."""
    ins, shapes = (P(), P(), P("d")), ((1024, 512), (512, 512), (512, 512))
    alone = planned(hidden, ON_8, ins, P("d"), *shapes)
    both = planned(lambda *x: (hidden(*x[:3]), x[3]), ON_8, (*ins, P("d")), (P("d"), P("d")), *shapes, (64,))
    assert both <= alone


@pytest.mark.parametrize(
    "mesh, x, w, out",
    [
        (ON_8, P(None, "d"), P(), P("d")),
        (ON_8, P(None, "d"), P(), P(None, "d")),
        (ON_2_4, P("d"), P("m", "d", None), P("m", "d")),
        (ON_2_4, P("d"), P(None, "d", None), P("m", "d")),
        (ON_2_4, P("m"), P(None, None, "m"), P("d")),
    ],
    ids=str,
)
def test_a_loop_costs_no_more_than_its_unrolled_body(mesh, x, w, out):
    """A carry may be moved before the loop, to how it leaves it or to how its body gives it."""

    def scanned(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def unrolled(x, w):
        for i in range(4):
            x = jnp.tanh(x @ w[i])
        return x

    loop, body = (planned(f, mesh, (x, w), out, (1024, 1024), (4, 1024, 1024)) for f in (scanned, unrolled))
    assert loop <= body


@pytest.mark.parametrize(
    "f", [lambda x, w: jnp.tanh(x @ w) * x, lambda x, w: jnp.cumsum(jnp.tanh(x @ w), 0) * x]
)
def test_a_branch_sends_no_more_than_its_body(f):
    ins, shapes = (P(None, "d"), P()), ((1024, 1024), (1024, 1024))
    alone, _ = planned(f, ON_8, ins, P(None, "d"), *shapes)

    def branches(p, *args):
        return lax.cond(p, f, lambda x, w: jnp.zeros_like(x), *args)

    sent, _ = planned(branches, ON_8, (P(), *ins), P(None, "d"), ((), "bool"), *shapes)
    assert sent <= alone


def residual(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def test_branches_give_their_results_as_they_are_annotated_outside():
    """Also where a loop stands in them: what it carries may be as the result of the branches is requested."""
    ins, shapes = (P(None, "d"), P(), P()), ((1024, 1024), (1024, 2048), (2048, 1024))

    def repeated(*args):
        x, *weights = args
        return lax.scan(lambda x, _: (residual(x, *weights), None), x, length=2)[0]

    for f in (residual, repeated):
        alone, price = planned(f, ON_8, ins, P("d"), *shapes)

        def branches(p, *args, f=f):
            return lax.cond(p, f, f, *args)

        sent, its = planned(branches, ON_8, (P(), *ins), P("d"), ((), "bool"), *shapes)
        assert sent <= alone and its <= 1.02 * price  # to write what they give takes its time


def test_what_comes_back_of_one_program_is_no_matter_of_another():
    """One of three arguments of the first has the type of its result, two of three of the second: alone these
    are state, and its are data, which completion spreads otherwise."""

    def heads(x, w, out):
        return jnp.einsum("bthd,hde->bte", jnp.tanh(jnp.einsum("bte,ehd->bthd", x, w)), out)

    def biased(x, b, w):
        return (x + b[None]) @ w

    ins = (P(None, None, "d"), P("d"), P(None, "d")), (P(), P("d"), P())
    shapes = ((8, 128, 512), (512, 8, 64), (8, 64, 512)), ((1024, 1024), (1024,), (1024, 1024))
    outs = P("d"), P(None, "d")
    each = [planned(f, ON_8, i, o, *s) for f, i, o, s in zip((heads, biased), ins, outs, shapes, strict=True)]

    def both(*args):
        return heads(*args[:3]), biased(*args[3:])

    sent, price = planned(both, ON_8, (*ins[0], *ins[1]), outs, *shapes[0], *shapes[1])
    assert sent == sum(nbytes for nbytes, _ in each) and price == sum(price for _, price in each)


def experts(x, gate, up, down):
    """A mixture of experts, all of them weighted."""
    weights = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate))
    hidden = jax.nn.relu(jnp.einsum("egm,emh->egh", jnp.einsum("gse,gsm->egm", weights, x), up))
    return jnp.einsum("gse,egm->gsm", weights, jnp.einsum("egh,ehm->egm", hidden, down))


@pytest.mark.parametrize(
    "specs, axis, rows",
    [
        ((P("x"), P(), P("y"), P("y")), "y", 2),
        ((P("x"), P(), P("x"), P("x")), "x", 8),
        ((P("x"), P(), P("x", None, "y"), P("x", "y")), "x", 8),
    ],
    ids=str,
)
def test_axes_that_one_program_cuts_cost_the_one_beside_it_nothing(specs, axis, rows):
    """A reshape splits its rows within an axis. What does not goes over the whole axis, as if it were alone."""
    mesh = AbstractMesh((16, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, *args = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((48 * rows, 512), (16, 64, 128), (128, 4), (4, 128, 256), (4, 256, 128))
    )

    def cutting(a):
        return jnp.cumsum(jnp.sin(a).reshape(rows, -1, 512), 2) * 2

    def price(f, ins, outs, *args):
        return sx.shard_jit(f, mesh=mesh, in_shardings=ins, out_shardings=outs).plan(*args).decisions.price

    alone = price(cutting, P(axis), None, a) + price(experts, specs, specs[0], *args)
    both = lambda a, *args: (cutting(a), experts(*args))  # noqa: E731
    assert price(both, (P(axis), *specs), (None, specs[0]), a, *args) <= alone + 1


@pytest.mark.parametrize("rule", ["... -> ...", "b s! -> b s!"])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_axes_that_no_operand_has_split_a_heavy_kernel(rule, spec):
    """What is computed in eighths takes an eighth of the time, and little to gather; of a light one that would
    take longer than to compute all of it everywhere."""
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((64, 64), "float32")

    def plan(flops, **options):
        kernel = sx.partition_as(rule, flops=lambda ins, outs: flops * math.prod(ins[0]))(jnp.sin)
        step = sx.shard_jit(
            lambda x: kernel(x) * 2, mesh=mesh, in_shardings=spec, out_shardings=P(), **options
        )
        return step.plan(x)

    seconds = 64 * 64 * 1e8 / NOMINAL.flops
    heavy, light = plan(1e8), plan(1)
    assert heavy.decisions.price <= seconds * PICO / 8 * 1.01
    assert light.comm_bytes <= 64 * 64 * 4 and light.decisions.price < 1e6


@pytest.mark.parametrize("count, kinds", [(32, {"ppermute"}), (128, {"all_to_all"})])
def test_few_images_are_not_split_further_on_tpus(count, kinds):
    """Images whose rows are split: with a few channels they are split by image over both axes for one
    all_to_all, and no convolution sends rows to its neighbours. Not where a device has so few then that a TPU
    takes several times as long."""
    mesh = AbstractMesh((4, 4), ("data", "rows"), axis_types=(AxisType.Auto,) * 2)
    dims = ("NHWC", "HWIO", "NHWC")

    def four(x, first, w):
        for weights in (first, w, w, w):
            x = jax.nn.silu(jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=dims))
        return x.sum()

    shapes = (count, 128, 128, 4), (3, 3, 4, 64), (3, 3, 64, 64)
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    shardings = (P("data", "rows"), None, None)
    step = sx.shard_jit(four, mesh=mesh, in_shardings=shardings, options=sx.Options(chip="v4"))
    assert {c.kind for c in step.plan(*args).collectives} - {"all_reduce"} == kinds


@pytest.mark.parametrize(
    "kernel, stride, padding", [(3, 1, "SAME"), (3, 2, "SAME"), (7, 2, "VALID"), (16, 16, "VALID")]
)
def test_what_a_kernels_gradient_sums_over_are_no_items_of_a_batch(kernel, stride, padding):
    """Of the operation itself and its operand's gradient images are, of the kernel's nothing: JAX has the
    channels there where images else are."""

    def f(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=dims).sum()

    shapes = (2, 224, 224, 4), (kernel, kernel, 4, 32)
    program = graph(jax.value_and_grad(f, argnums=(0, 1)), *shapes)
    items = {}
    for node in program.walk():
        if node.name == "conv_general_dilated":
            (made,) = (v.shape for v in node.outputs)
            what = "operand" if made == shapes[0] else "kernel" if kernel in made else "result"
            items[what] = RULES[node.name].batch(node.params, [v.shape for v in node.inputs], [made])
    assert items == {"result": 2, "operand": 2, "kernel": None}


def test_idle_axes_raise_no_price():
    """Of products whose operands have none of them, however long: to be split over them is one more way."""

    def price(idle, inner):
        mesh = AbstractMesh((4, idle), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        step = sx.shard_jit(jnp.matmul, mesh=mesh, in_shardings=(P("x"), P()), out_shardings=P("x"))
        args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, inner), (inner, 4096))]
        return step.plan(*args).decisions.price

    prices = {inner: [price(idle, inner) for idle in (1, 2, 8)] for inner in (512, 4096, 8192, 32768)}
    assert all(later <= first + 1 for first, *rest in prices.values() for later in rest)
    assert prices[32768][1] < 0.8 * prices[32768][0]


def test_a_residual_stream_settles_each_sum_once():
    """Nothing is kept pending beside what a norm has settled: no device adds zeros to a part of a sum. A
    quarter of the rows on each device between the layers takes less time than all of them on each, though
    norms are of a quarter there too. Only the first norm is of whole rows: what it divides by is gathered.
    """
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def layers(x, ups, downs, between=lambda x: x):
        for up, down in zip(ups, downs, strict=True):
            normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1)
            x = between(x + jax.nn.relu(normed @ up) @ down)
        return x

    x, up, down = (
        jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 1024), (1024, 4096), (4096, 1024))
    )
    ins = (P(), [P(None, "x")] * 6, [P("x")] * 6)
    plan = sx.shard_jit(layers, mesh=mesh, in_shardings=ins).plan(x, [up] * 6, [down] * 6)
    annotated = partial(layers, between=lambda x: sx.annotate(x, P()))
    whole = sx.shard_jit(annotated, mesh=mesh, in_shardings=ins).plan(x, [up] * 6, [down] * 6)
    assert plan.comm_bytes <= (6 * 2 * (512 * 1024 * 4) + 512 * 4) * 3 // 4
    assert plan.decisions.price < 0.97 * whole.decisions.price
    assert "jnp.where" not in plan.source()


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2)], ids=str)
def test_a_train_step_of_a_few_layers_is_near_its_bound(sizes):
    """Tables outgrow the limit there, so messages must find what is left, and say how little that is."""

    def loss(layers, x):
        for w in layers:
            normed = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1)
            x = x + jnp.tanh(normed @ w["up"] + w["bias"][None]) @ w["down"]
        return jnp.mean(x**2)

    def step(layers, x):
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value

    names = "xyz"[: len(sizes)]
    rest, batch = (None, "x") if len(sizes) == 2 else ("z", ("x", "z"))
    mesh = AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Auto,) * len(sizes))
    specs = {"up": P(rest, "y"), "bias": P("y"), "down": P("y", rest)}
    shapes = {"up": (64, 128), "bias": (128,), "down": (128, 64)}
    layer = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    program = sx.shard_jit(step, mesh=mesh, in_shardings=([specs] * 4, P(batch)))
    decisions = program.plan([layer] * 4, jax.ShapeDtypeStruct((64, 64), "float32")).decisions
    assert decisions.gap <= 0.03 * decisions.price  # 0.20 and 0.23 after eight sweeps, and 9 % dearer


def accumulating(depth: int):
    """Scans in one another that add up products over a split dim."""

    def body(total, x, d):
        if d == 0:
            return total + x @ x.T
        return lax.scan(lambda t, _: (body(t, x, d - 1), None), total, None, length=3)[0]

    return lambda x: body(jnp.zeros((16, 16)), x, depth)


def test_nested_loops_are_planned_in_time_that_grows_with_their_depth():
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16, 64), "float32")

    def seconds(depth):
        start = time.process_time()
        plan = sx.shard_jit(accumulating(depth), mesh=mesh, in_shardings=P(None, "x")).plan(x)
        assert [(c.kind, c.trips) for c in plan.collectives] == [("all_reduce", 1)]
        return time.process_time() - start

    seconds(1)  # what is loaded and traced once
    assert seconds(6) <= 6 * seconds(1) + 0.5


@pytest.mark.parametrize("trips", [(4, 4), (2, 2, 4)])
def test_loops_in_loops_send_what_one_loop_sends(trips):
    """All of them carry a gradient as the innermost makes it: split, where little is sent for that."""

    def loss(w, x):
        return jnp.sum((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    def added(total, w, xs, loops):
        if loops == 0:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, xs))
        return lax.scan(lambda t, x: (added(t, w, x, loops - 1), None), total, xs)[0]

    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    shapes = {"up": (256, 1024), "down": (1024, 256)}
    w = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def sent(*trips):
        step = sx.shard_jit(
            lambda w, xs: added(jax.tree.map(jnp.zeros_like, w), w, xs, len(trips)),
            mesh=mesh,
            in_shardings=(P(), P(*[None] * len(trips), "x")),
            out_shardings=P(),
        )
        return step.plan(w, jax.ShapeDtypeStruct((*trips, 64, 256), "float32")).comm_bytes

    assert sent(*trips) <= sent(16)


def test_carries_wait_for_their_sum():
    def f(x, w):
        return lax.fori_loop(0, 5, lambda i, total: total + x @ w, jnp.zeros((8, 8)))

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, w = ramp(8, 64) / 64, ramp(64, 8) / 64
    step = sx.shard_jit(f, mesh=mesh, in_shardings=(P(None, "x"), P("x")))
    np.testing.assert_allclose(step(x, w), jax.jit(f)(x, w), rtol=1e-4)
    assert [(c.kind, c.trips) for c in step.plan(x, w).collectives] == [("all_reduce", 1)]


def test_what_comes_after_the_last_loop_is_laid_out_once(monkeypatch):
    """All before it twice: first to see in which layouts it gives back what it carries."""
    laid_out, ways_of = [], Alternatives.of
    monkeypatch.setattr(
        Alternatives, "of", lambda self, node, *how: laid_out.append(node.name) or ways_of(self, node, *how)
    )

    def f(x, w):
        return jnp.tanh(lax.fori_loop(0, 5, lambda i, total: total + x @ w, jnp.zeros((8, 8))))

    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 8)))
    sx.shard_jit(f, mesh=mesh, in_shardings=(P(None, "x"), P("x"))).plan(x, w)
    assert laid_out.count("dot_general") == 2 and laid_out.count("tanh") == 1


def test_branches_leave_what_all_of_them_owe():
    def f(flag, x, w):
        return lax.cond(flag, lambda: x @ w, lambda: 2 * (x @ w))

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, w = ramp(8, 64) / 64, ramp(64, 8) / 64
    step = sx.shard_jit(f, mesh=mesh, in_shardings=(None, P(None, "x"), P("x")))
    for flag in (True, False):
        np.testing.assert_allclose(step(flag, x, w), jax.jit(f)(flag, x, w), rtol=1e-4)
    assert [c.kind for c in step.plan(True, x, w).collectives] == ["all_reduce"]


# Copies

WHOLE, ROWS_X, COLS_X = (Layout(Sharding(dims), (8, 8)) for dims in (((), ()), (("x",), ()), ((), ("x",))))


def price(source, target):
    return 0.0 if is_cut(source, target) else 10.0


def test_what_is_cut_out_of_a_copy_is_free():
    assert is_cut(WHOLE, ROWS_X) and not is_cut(ROWS_X, WHOLE) and not is_cut(ROWS_X, COLS_X)
    owing = Layout(Sharding(((), ())), (8, 8), (("x", "sum"),))
    assert not is_cut(owing, WHOLE) and not is_cut(owing, ROWS_X)


def test_a_copy_is_shared_by_its_readers():
    found = copies_of([ROWS_X], [[WHOLE, ROWS_X], [WHOLE, COLS_X]], price)
    alone, shared = (found.states.index((ROWS_X, chosen)) for chosen in ((), (WHOLE,)))
    pays = dict(zip(found.read, found.reading.T, strict=True))
    assert found.making[shared] == 10 and pays[WHOLE][shared] == pays[COLS_X][shared] == 0
    assert found.making[alone] == 0 and pays[WHOLE][alone] == pays[COLS_X][alone] == 10


def test_what_one_reader_alone_may_use_is_no_copy_for_all():
    found = copies_of([ROWS_X], [[WHOLE, ROWS_X], [COLS_X, ROWS_X]], price)
    assert [chosen for _, chosen in found.states] == [
        (),
        (WHOLE,),
    ]  # the second reader cuts its part out of it
    assert (ROWS_X, (COLS_X,)) not in found.states


# Random programs against all choices


def random_program(seed):
    """Up to eight operations on two matrices, split over one axis somehow; some results are asked for in some
    layout.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 5, int(rng.integers(3, 9)))
    picks = rng.random((len(kinds), 2))

    def f(a, b):
        values = [a, b]
        for kind, (p, q) in zip(kinds, picks, strict=True):
            x, y = values[int(p * len(values))], values[int(q * len(values))]
            made = (x + y, jnp.tanh(x), x @ y.T @ y, x * x.sum(axis=0), x / y.max(axis=1, keepdims=True))[
                kind
            ]
            values.append(made)
        return values[-1], values[-2]

    spec = lambda: (P("x"), P(None, "x"), P())[rng.integers(3)]  # noqa: E731
    return f, (spec(), spec()), (spec(), spec())


def cheapest_of_all(search):
    """The least price of any choice of ways, each priced by itself: its own, and for each value the copies
    that serve its readers best, at most two of them made for all."""
    sites = [site for site in search.sites if len(site.ways) > 1]
    reads = {}
    for value, site, i in search.reading:
        if not value.is_literal and not site.renames:
            reads.setdefault(search.root_of(value, site.user_requested), []).append((site, i))
    price = cache(search.price)

    def served(value, made, wanted):
        def left(shared):
            return sum(
                min([price(value, made, t), *(price(value, c, t) for c in shared if is_cut(c, t))])
                for t in wanted
            )

        shareable = [c for c in dict.fromkeys(wanted) if price(value, made, c) > 0]
        some = [(), *((c,) for c in shareable), *itertools.combinations(shareable, 2)]
        return min(sum(price(value, made, c) for c in shared) + left(shared) for shared in some)

    served = cache(served)

    def total(ways):
        chosen = {site: site.ways[0] for site in search.sites} | dict(zip(sites, ways, strict=True))
        own = sum(way.price for way in chosen.values())
        return own + sum(
            served(
                v,
                chosen[search.maker[v][0]].results[search.maker[v][1]],
                tuple(chosen[s].operands[i] for s, i in readers),
            )
            for v, readers in reads.items()
        )

    count = np.prod([len(site.ways) for site in sites], dtype=float)
    return min(map(total, itertools.product(*(site.ways for site in sites)))) if count <= 4000 else None


@pytest.mark.promotes_ranks
@pytest.mark.once
def test_what_is_chosen_is_the_exhaustive_optimum(monkeypatch):
    """Of programs of up to eight operations; those of too many choices are left out."""
    found, compared, seed = [], 0, 0
    solve = Search.solve
    monkeypatch.setattr(Search, "solve", lambda search: found.append((search, solve(search))) or found[-1][1])
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    while compared < 40:
        f, ins, outs = random_program(seed)
        args = [jax.ShapeDtypeStruct(((6, 10), (512, 1024))[seed % 2], "float32")] * 2
        seed += 1
        sx.shard_jit(f, mesh=mesh, in_shardings=ins, out_shardings=outs).plan(*args)
        search, solution = found.pop()
        least = cheapest_of_all(search)
        if least is not None:
            assert solution.price == pytest.approx(least, rel=1e-9, abs=0.5), (
                seed - 1
            )  # ties are broken by less
            compared += 1


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize("seeds", [range(first, first + 3) for first in range(0, 12, 3)], ids=str)
def test_over_many_axes_what_is_chosen_costs_no_more_than_with_all_prices_known(seeds, monkeypatch):
    """A search begins with lower bounds, and finds the prices of what it chooses: of many fewer reshards."""
    mesh = AbstractMesh((2, 2, 2, 2), tuple("wxyz"), axis_types=(AxisType.Auto,) * 4)
    solve, found, unknown = Search.solve, [], 0
    monkeypatch.setattr(Search, "solve", lambda search: found.append((search, solve(search))) or found[-1][1])
    for seed in seeds:
        f, *_ = random_program(seed)
        rng, specs = np.random.default_rng(seed), []
        for _ in range(4):
            places = rng.integers(3, size=4)
            specs.append(
                P(*(tuple(a for a, at in zip("wxyz", places, strict=True) if at == d) for d in (0, 1)))
            )
        args = [jax.ShapeDtypeStruct(((48, 80), (512, 1024))[seed % 2], "float32")] * 2
        step = sx.shard_jit(f, mesh=mesh, in_shardings=tuple(specs[:2]), out_shardings=tuple(specs[2:]))
        price, (search, solution) = step.plan(*args).decisions.price, found.pop()
        with monkeypatch.context() as patch:
            patch.setattr(Search, "is_exact", lambda *_: True)
            fully = sx.shard_jit(f, mesh=mesh, in_shardings=tuple(specs[:2]), out_shardings=tuple(specs[2:]))
            known, (_, best) = fully.plan(*args).decisions.price, found.pop()
        unknown += len(search.alternatives.exact)
        assert solution.bound <= best.price + 1
        if solution.price - solution.bound < 1 and best.price - best.bound < 1:
            assert price == pytest.approx(known, abs=2), seed
    assert unknown


def test_memory_is_bought_for_time():
    """A short array is cheaper gathered once than reduced three times, and takes more memory."""

    def f(x):
        y = jnp.tanh(x)
        return y.sum(), y.max(), y.min()

    program = inline.from_jaxpr(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((16,), "float32")))
    known, outs = complete(program, [Sharding((("x",),))], Network({"x": 4})), [replicated_layout(())] * 3
    prices = (0.0, 1.0, 1e9)
    found = [
        choose(program, known, [Layout(Sharding((("x",),)), (16,))], outs, byte_price=price)
        for price in prices
    ]
    kept = [memory(d, {"x": 4}) for d in found]
    seconds = [d.price - n * p for d, n, p in zip(found, kept, prices, strict=True)]
    assert kept == sorted(kept, reverse=True) and (kept[0], kept[-1]) == (4 * 4 + 16 * 4 + 12, 4 * 4 + 2 * 12)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def expert_layer(
    experts: int, groups: int, tokens: int, width: int, hidden: int, capacity: int, placed=lambda x: x
):
    """A layer of experts with top-1 routing, as GShard writes it, with its gradients; and its arguments.
    `placed`: what is done with the dispatched tokens."""

    def layer(gate_ME, up_EMF, down_EFM, x_GSM):
        gates_GSE = jax.nn.softmax(x_GSM @ gate_ME)
        mask_GSE = jax.nn.one_hot(jnp.argmax(gates_GSE, axis=-1), experts)
        place_GSE = ((jnp.cumsum(mask_GSE, axis=1) - 1.0) * mask_GSE).astype("int32")
        dispatch_GSEC = mask_GSE[..., None] * jax.nn.one_hot(place_GSE, capacity)
        combine_GSEC = dispatch_GSEC * jnp.max(gates_GSE, axis=-1)[:, :, None, None]
        taken_EGCM = placed(jnp.einsum("gsec,gsm->egcm", dispatch_GSEC, x_GSM))
        hidden_EGCF = jax.nn.relu(jnp.einsum("egcm,emf->egcf", taken_EGCM, up_EMF))
        made_EGCM = placed(jnp.einsum("egcf,efm->egcm", hidden_EGCF, down_EFM))
        return jnp.mean(jnp.einsum("gsec,egcm->gsm", combine_GSEC, made_EGCM) ** 2)

    shapes = (width, experts), (experts, width, hidden), (experts, hidden, width), (groups, tokens, width)
    return jax.value_and_grad(layer, argnums=(0, 1, 2)), [jax.ShapeDtypeStruct(s, "float32") for s in shapes]


EP = ("expert", "data")
LAYERS_OF_EXPERTS = [  # devices, sizes, chip, the tokens' spec, the weights'
    ((4, 8), (64, 16, 128, 256, 4096, 16), "H200", P(EP), P("expert")),
    ((4, 4), (8, 64, 64, 512, 2048, 16), "H200", P(EP[::-1]), P("expert")),
    ((8, 2), (32, 64, 128, 256, 4096, 64), "v4", P("data"), P("expert")),
    ((8, 2), (32, 128, 512, 512, 1024, 8), None, P("data"), P("expert", None, "data")),
    ((2, 8), (32, 64, 512, 1024, 4096, 16), "H200", P("data"), P(EP[::-1])),
    ((4, 8), (8, 32, 128, 1024, 4096, 16), "v5p", P("data"), P("expert", None, "data")),
]


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize("devices, sizes, chip, data, up", LAYERS_OF_EXPERTS, ids=str)
def test_to_annotate_dispatched_tokens_gains_little(devices, sizes, chip, data, up):
    """A constraint should gain nothing. It may where it suggests a layout that nothing else does: by a fifth
    at most, where it was up to 2.9 times before products had wishes."""
    mesh = AbstractMesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def price(spec=None):
        def placed(x):
            return x if spec is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        f, args = expert_layer(*sizes, placed=placed)
        options = sx.Options(chip=chip) if chip else sx.Options()
        step = sx.shard_jit(
            f,
            mesh=mesh,
            in_shardings=(None, up, up, data),
            out_shardings=(None, (None, up, up)),
            options=options,
        )
        return step.plan(*args).decisions.price

    specs = P("expert", "data"), P("expert"), P(EP), P(None, EP), P(None, "data")
    assert price() <= 1.22 * min(map(price, specs))


SMALL, ODD = (32, 64, 128, 256, 8), (16, 128, 512, 2048, 16)


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize(
    "experts, sizes, up",
    [
        (64, SMALL, P("data", None, "model")),
        (32, SMALL, P(None, "data", "model")),
        (16, ODD, P("data", None, "model")),
        (32, ODD, P("data")),
    ],
    ids=str,
)
def test_a_finer_mesh_never_costs_more(experts, sizes, up):
    """16 devices that are named 4 by 4, the same placement: all that could be done along 16 is looked at."""

    def price(axes, data):
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        down = P(up[0], *up[:0:-1])
        specs = [P(*[data if entry == "data" else entry for entry in spec]) for spec in (up, down, P("data"))]
        f, args = expert_layer(experts, *sizes)
        step = sx.shard_jit(f, mesh=mesh, in_shardings=(P(), *specs))
        return step.plan(*args).decisions.price

    assert price({"a": 4, "b": 4, "model": 8}, ("a", "b")) <= price({"data": 16, "model": 8}, "data")


def test_a_products_sum_is_scattered_as_its_transpose_needs_it():
    """The product is made in that order, so that to scatter another dim of it, and to move what is left of
    that to where it belongs, spares nothing. A weight of GSPMD's Table 2 on 32 x 64 (`benchmarks/tpu.py`)."""
    mesh = AbstractMesh((32, 64), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def gradient(x, dy):
        dw = jnp.einsum("bsknd,bsm->kndm", dy, x)
        return jnp.transpose(dw, (3, 0, 1, 2)).astype("float32")

    specs = dict(in_shardings=(P("y"), P("y", None, None, "x")), out_shardings=P("x", None, "y"))
    jitted = sx.shard_jit(gradient, mesh=mesh, options=sx.Options(chip="v3"), **specs)
    shapes = (1024, 1024, 8192), (1024, 1024, 3, 128, 256)
    plan = jitted.plan(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))
    whole, half = (8192, 3, 4, 256), (128, 3, 2, 256)
    sent = [(c.kind, c.operands[0].shape) for c in plan.collectives]
    assert sent == [("reduce_scatter", whole), ("ppermute", half), ("ppermute", half)]

"""Every collective of every plan says why it is there: a reason, a line, and the facts, as the two that
clashed.
"""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.ledger.collectives import AS_WRITTEN
from shardax.partition.reasons import Resharded, Settled
from shardax.spmd_rules.sends import Sent
from tests import test_traffic
from tests.ledger_programs import PROGRAMS, floats
from tests.test_loops import PROGRAMS as LOOPS

pytestmark = pytest.mark.mixed_dtypes
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def abstract(mesh):
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def tell(plan):
    """(collective, its reason, its facts), alike ones once."""
    return list(
        dict.fromkeys(
            (f"{c.kind} over {','.join(c.axes)}", c.reason, plan.because(c)) for c in plan.collectives
        )
    )


SHARDING = r"(P\(.+?\)|replicated)"
CLASH = re.compile(
    rf"\S.* {SHARDING}.* against .*({SHARDING}|unsplit|owe a|itself send|trips are not split).*|.*, padded to .*"
)
FACTS = {
    Resharded: CLASH,
    Settled: re.compile("over .*|what each iteration .*|owed in .*"),
    Sent: re.compile(".+"),
}


def check(plan, written=False):
    assert "unknown line" not in str(plan)
    for c in itertools.chain.from_iterable(whole.parts for whole in plan.collectives):
        assert c.reason and re.search(r"\.py:\d+$", c.line), c
        assert (c.reason == AS_WRITTEN) == (c.cause is None) and (written or c.cause), c
        because = plan.because(c)
        assert not re.search(r" at /", c.reason + because), (c, because)
        assert (
            because and "\n" not in because and (c.cause is None or FACTS[type(c.cause)].fullmatch(because))
        ), (c, because)


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_many_kinds(name):
    f, args = PROGRAMS[name].make(abstract(PROGRAMS[name].mesh))
    check(f.plan(*args), written=name == "island")


@pytest.mark.promotes_ranks
def test_programs_that_send_little():
    """Every operation that sends by itself is among them."""
    for f, args, ins, outs, _ in test_traffic.ROWS.values():
        check(sx.shard_jit(f, mesh=test_traffic.MESH, in_shardings=ins, out_shardings=outs).plan(*args))


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name):
    f, args, specs = LOOPS[name]
    check(sx.shard_jit(f, mesh=test_traffic.MESH, in_shardings=specs).plan(*args))


def plan(f, specs, *shapes, out=None, mesh=MESH):
    return sx.shard_jit(f, mesh=mesh, in_shardings=specs, out_shardings=out).plan(
        *(floats(*shape) for shape in shapes)
    )


def product(x, w):
    return x @ w


def annotated(x):
    y = jnp.sin(x)
    y = sx.annotate(y, P(None, "data"))  # asked
    return y * 2


def sums(x, w):
    h = jnp.sin(x @ w)
    return h.sum(0)


def total(x):
    return jnp.sin(x).sum()


def looped(x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sort(sx.annotate(c, P("data")), axis=0), x)  # carry


def counted(x):
    return lax.scan(lambda c, row: (c + row, c), jnp.zeros(x.shape[1]), x)


def prefix(x):
    return lax.cumsum(x, 0)


def convolved(x, k):
    return lax.conv(x, k, (1, 1), "SAME")


def best(x):
    return x.argmax(0)


def rows(x):
    return jnp.sort(sx.annotate(x, P("data")), axis=1)  # rows


def called(x):
    return io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def called_in_trips(x):
    def trip(c, row):
        return c, jax.pure_callback(np.sin, row, row)  # trips

    return lax.scan(trip, 0.0, x)[1]


def called_on_carry(x):
    return lax.fori_loop(0, 3, lambda i, c: jax.pure_callback(np.sin, c, c), x)


BOTH = P("data"), P(None, "data")
SAID = {  # name: (function, specs, shapes, how results rest), what is said of each collective
    "operands clash": (
        (product, BOTH, [(16, 8), (8, 12)], None),
        [
            (
                "all_gather over data",
                "dot_general in P(None, None)",
                "w P(None, 'data') by in_shardings[1] against x P('data') by in_shardings[0]",
            )
        ],
    ),
    "a contraction": (
        (product, (P("model", "data"), P("data")), [(16, 512), (512, 12)], None),
        [("all_reduce over data", "sum of dot_general", "over dim 1 of x and dim 0 of w, split by x and w")],
    ),
    "a reduction": (
        (sums, (P("data"), None), [(16, 8), (8, 12)], None),
        [("all_reduce over data", "sum of reduce_sum", "over dim 0 of h, split by x")],
    ),
    "a reduction that nobody split": (
        (total, None, [(4096, 64)], None),
        [
            (
                "all_reduce over data,model",
                "sum of reduce_sum",
                "over dim 0 of sin, split by no annotation, for speed",
            )
        ],
    ),
    "an annotation": (
        (annotated, P("data"), [(16, 8)], None),
        [
            (
                "all_to_all over data",
                "annotate in P(None, 'data')",
                "y P('data') by x against P(None, 'data') by annotate at test_because.py:ASKED",
            )
        ],
    ),
    "how a result rests": (
        (jnp.sin, P("data"), [(16, 8)], P(None, "data")),
        [
            (
                "all_to_all over data",
                "out_shardings in P(None, 'data')",
                "sin P('data') by x against P(None, 'data') by out_shardings",
            )
        ],
    ),
    "rows that do not divide, computed on as they rest": ((jnp.sin, P("data"), [(10, 8)], None), []),
    "rows that do not divide": (
        (rows, P("data"), [(10, 8)], None),
        [
            (
                "all_to_all over data",
                "in_shardings[0] in P('data', None)",
                "x P(None, 'data') as it rests against P('data') by in_shardings[0], which does not divide",
            ),
            (
                "all_to_all over data",
                "result in P(None, 'data')",
                "sort P('data') by annotate at test_because.py:ROWS against the result P(None, 'data'), "
                "for P('data') does not divide [10,8]",
            ),
        ],
    ),
    "what must be unsplit, in a loop": (
        (looped, P("data"), [(16, 8)], None),
        [
            (
                "all_to_all over data",
                "sort in P(None, 'data')",
                "the carry f32[16,8] P('data') by annotate at test_because.py:CARRY against sort, which "
                "needs dim 0 unsplit",
            ),
            (
                "all_to_all over data",
                "what scan gives back in P('data', None)",
                "sort P(None, 'data') as it is made against P('data'), in which scan gives it back",
            ),
        ],
    ),
    "a recurrence": (
        (counted, P("data"), [(16, 8)], None),
        [
            (
                "all_gather over data",
                "scan in P(None, None)",
                "x P('data') by in_shardings[0] against scan, whose trips are not split",
            )
        ],
    ),
    "a cumulative sum": (
        (prefix, P("data"), [(16, 8)], None),
        [("all_gather over data", "totals of cumsum", "along dim 0 of x, split by in_shardings[0]")],
    ),
    "a convolution": (
        (convolved, (P(None, None, "data"), None), [(1, 2, 16, 8), (3, 2, 3, 3)], None),
        [
            (
                "ppermute over data",
                "halo of conv_general_dilated",
                "along dim 2 of x, split by in_shardings[0]",
            )
        ],
    ),
    "the best of each shard": (
        (best, P("data"), [(1024, 8)], None),
        [("all_gather over data", "bests of argmax", "along dim 0 of x, split by in_shardings[0]")],
    ),
    "axes that nobody gave": (
        (best, P("data"), [(16, 8)], None),
        [
            (
                "all_to_all over data,model",
                "argmax in P(None, ('data', 'model'))",
                "x P('data') by in_shardings[0] against argmax, which takes it P(None, ('data', 'model'))",
            ),
            (
                "all_gather over data,model",
                "result in P(None)",
                "argmax P(('data', 'model')) as it is made against the result replicated",
            ),
        ],
    ),
    "a callback": (
        (called, P(), [(4,)], None),
        [("all_reduce over data,model", "result of io_callback", "to all devices along data, model")],
    ),
    "a callback gathers what it is given": (
        (called, P("data"), [(16, 8)], None),
        [
            (
                "all_gather over data",
                "io_callback in P(None, None)",
                "x P('data') by in_shardings[0] against io_callback, which is called once, on whole arrays",
            ),
            ("all_reduce over data,model", "result of io_callback", "to all devices along data, model"),
        ],
    ),
    "a callback in each trip": (
        (called_in_trips, P("data"), [(16, 8)], None),
        [
            (
                "all_gather over data",
                "scan in P(None, None)",
                "x P('data') by in_shardings[0] against scan, whose trips are not split: pure_callback at "
                "test_because.py:TRIPS is called once in each",
            ),
            ("all_reduce over data,model", "result of pure_callback", "to all devices along data, model"),
        ],
    ),
    "a callback on a loop's carry": (
        (called_on_carry, P("data"), [(16, 8)], None),
        [
            (
                "all_gather over data",
                "scan in P(None, None)",
                "x P('data') by in_shardings[0] against scan, which takes it replicated: pure_callback is "
                "called once, on whole arrays",
            ),
            ("all_reduce over data,model", "result of pure_callback", "to all devices along data, model"),
        ],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name):
    (f, specs, shapes, out), expected = SAID[name]
    made = plan(f, specs, *shapes, out=out)
    assert tell(made) == [(kind, reason, with_lines(facts)) for kind, reason, facts in expected]


def with_lines(facts):
    """The facts, each WORD as the number of the line of this file that ends so."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    numbers = {
        line.rpartition("  # ")[2].upper(): i
        for i, line in lines
        if line.endswith(("# asked", "# rows", "# carry", "# trips"))
    }
    return re.sub("py:([A-Z]+)", lambda found: f"py:{numbers[found[1]]}", facts)


def test_axes_are_those_that_the_user_named():
    """On the common refinement x is two axes."""
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    other = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def f(v):
        return sx.annotate(v, jax.sharding.NamedSharding(other, P(None, "b"))).sum(1)

    told = tell(plan(f, P("x"), (16, 8), mesh=mesh))
    assert [collective for collective, _, _ in told] == [
        "all_to_all over b",
        "all_gather over a",
        "all_reduce over b",
    ]
    asked = "annotate on (a=2, b=4)"
    assert [facts.rsplit(" at ", 1)[0] for _, _, facts in told] == [
        *[f"v P('x') by in_shardings[0] against P(None, 'b') by {asked}"] * 2,
        f"over dim 1 of v, split by {asked}",
    ]
    check(plan(f, P("x"), (16, 8), mesh=mesh))


def test_gradients_are_called_so():
    def loss(w, x):
        h = jnp.tanh(x @ w)
        return h.sum()

    ((_, reason, facts),) = tell(plan(jax.grad(loss), (None, P("data")), (8, 4), (16, 8)))
    assert reason == "sum of dot_general"
    assert re.fullmatch(r"over dim 0 of the gradient's \w+ and dim 0 of x, split by x", facts)


def test_equal_layers_are_told_together():
    def layers(ws, x):
        for w in ws:
            x = x @ w["up"]
            x = x @ w["down"]
        return x

    specs = [{"up": P(None, "model"), "down": P("model")}] * 3, P("data")
    args = [{"up": floats(8, 16), "down": floats(16, 8)}] * 3, floats(16, 8)
    text = sx.shard_jit(layers, mesh=MESH, in_shardings=specs).plan(*args).text()
    assert (
        "over dim 1 of x and dim 0 of ws/{0..2}/down, split by ws/{0..2}/up and ws/{0..2}/down"
        in " ".join(text.split())
    )


def test_lowerings_of_users_send_as_they_write_it():
    """And may say why."""

    def f(x):
        def ring(block):
            with jax.named_scope("all_reduce[all of it]"):
                total = lax.psum(block, "data")
            return total + lax.pmax(block, "data")

        return jax.shard_map(ring, in_specs=P("data"), out_specs=P("data"))(x)

    assert tell(plan(f, P("data"), (16, 8))) == [
        ("all_reduce over data", "all of it", ""),
        ("all_reduce over data", AS_WRITTEN, "the program sends it itself"),
    ]


def test_lowerings_send_through_one_file():
    """Where each collective gets its reason; the islands' are their users'."""
    rules = Path(sx.__file__).parent / "spmd_rules"
    sends = r"lax\.(psum|psum_scatter|pmax|pmin|ppermute|all_gather|all_to_all)\("
    found = [file.name for file in rules.glob("*.py") if re.search(sends, file.read_text())]
    assert sorted(found) == ["islands.py", "sends.py"]


def test_a_line_says_what_it_sends():
    made = plan(product, BOTH, (16, 8), (8, 12))
    (c,) = made.collectives
    told = made.why(c.line.rsplit("/", 1)[-1])
    assert told.endswith(f"\n{c}\n    {made.because(c)}")


def test_json_and_html_have_the_facts(tmp_path):
    made = plan(product, BOTH, (16, 8), (8, 12))
    (c,) = made.collectives
    (entry,) = json.loads(made.to_json())["collectives"]
    assert entry["because"] == made.because(c) and entry["reason"] == c.reason and entry["nbytes"] == c.nbytes
    made.to_html(tmp_path / "plan.html")
    assert (
        "<div>w P(None, &#x27;data&#x27;) by in_shardings[1] against x"
        in (tmp_path / "plan.html").read_text()
    )


def test_the_boundary_serves_the_line_of_the_function():
    made = plan(rows, P("data"), (10, 8))
    assert made.collectives[0].line == f"{__file__}:{rows.__code__.co_firstlineno}"

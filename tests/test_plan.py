"""The plan of a program written by hand: what it counts, and its text."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.cost import chips
from shardax.cost.network import Message, Network
from shardax.explain.by_line import sent_by_line
from shardax.explain.placed import AtRest, placed
from shardax.explain.plan import Plan
from shardax.explain.roofline import estimate, work
from shardax.explain.tables import MOST, Group, Row, Table, plain
from shardax.explain.terminal import rich_text
from shardax.explain.text import tables
from shardax.ledger.collectives import comm_bytes
from shardax.sharding import Sharding

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS = 3
GATHERED = "argument 0/embed at rest in P(None, 'model')"


def layer(x_BM, weights):
    h_BH = jax.nn.relu(x_BM @ weights["up"])
    with jax.named_scope("all_reduce[sum of dot_general]"):
        return x_BM + lax.psum(h_BH @ weights["down"], "model")


def shards(state, batch_B):
    with jax.named_scope(f"all_gather[{GATHERED}]"):
        embed_VM = lax.all_gather(state["embed"], "model", axis=1, tiled=True)
    x_BM = embed_VM[batch_B]
    for i in range(LAYERS):
        x_BM = layer(x_BM, state[f"layer_{i}"])
    x_BM, _ = lax.scan(lambda c, _: (layer(c, state["layer_0"]), None), x_BM, None, length=4)
    x_BM = lax.while_loop(lambda c: c[0, 0] < 0, lambda c: lax.pmax(c, "data"), x_BM)
    x_BM = lax.cond(x_BM[0, 0] > 1, lambda c: c, lambda c: lax.ppermute(c, "data", [(0, 1), (1, 0)]), x_BM)
    x_BM = lax.cond(x_BM[0, 0] > 2, lambda c: lax.pmin(c, "data"), lambda c: lax.pmin(c, "model"), x_BM)
    return state, lax.psum(x_BM.sum(), ("data", "model"))


LAYER = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
STATE = {"embed": jax.ShapeDtypeStruct((257, 64), jnp.float32)} | {f"layer_{i}": LAYER for i in range(LAYERS)}
BATCH = jax.ShapeDtypeStruct((16,), jnp.int32)
LAYER_SPECS = {"up": P(None, "model"), "down": P("model")}
SPECS = {"embed": P(None, "model")} | {f"layer_{i}": LAYER_SPECS for i in range(LAYERS)}


IN_SPECS = (SPECS, P("data"))
OUT_SPECS = (SPECS, P())


def on_mesh(specs):
    return jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)


def make_plan(body=shards, in_specs=IN_SPECS, out_specs=OUT_SPECS, args=(STATE, BATCH), **fields) -> Plan:
    f = jax.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    jaxpr = jax.make_jaxpr(f)(*args)
    return Plan(MESH, jaxpr, jaxpr, on_mesh(in_specs), on_mesh(out_specs), **fields)


def plan_with_embedding_moved() -> Plan:
    plan = make_plan()
    embed = next(iter(plan.arguments()))
    return make_plan(at_rest=(AtRest.of("argument", embed, Sharding((("model",), ())), came=257 * 32 * 4),))


GOLDEN = """\
8 devices, mesh data=4, model=2. Each sends 43.1 KiB per call, in 12 collectives.

Arguments at rest: 224.1 KiB on each device
  P(None, 'model')
    0/layer_{0..2}/up                                                                3 x f32[64,256]  96.0 KiB
    0/embed                                                                          f32[257,64]      32.1 KiB
  P('model')
    0/layer_{0..2}/down                                                              3 x f32[256,64]  96.0 KiB
  P('data')
    1                                                                                i32[16]              16 B

Results at rest: 224.1 KiB on each device
  7 are sharded as the arguments of the same paths
  replicated
    1                                                                                               f32[]  4 B

Stored otherwise than requested, where the requested sharding does not divide                      sent for it
    argument 0/embed [257,64]: requested P('model'), stored as P(None, 'model')                       32.1 KiB

Collectives, by the line that they serve                                                each     total   share
  tests/test_plan.py:NN: argument 0/embed at rest in P(None, 'model')
    all_gather over model of f32[257,32]                                            32.1 KiB  32.1 KiB  74.5 %
  tests/test_plan.py:NN: sum of dot_general
    all_reduce over model of f32[4,64]                                               1.0 KiB   4.0 KiB   9.3 %
        4 trips
    3 x all_reduce over model of f32[4,64]                                           1.0 KiB   3.0 KiB   7.0 %
  tests/test_plan.py:NN: as written
    all_reduce over data of f32[4,64]                                                1.5 KiB   1.5 KiB   3.5 %
        in a while loop: counted for one iteration
  tests/test_plan.py:NN: as written
    all_reduce over data of f32[4,64]                                                1.5 KiB   1.5 KiB   3.5 %
    all_reduce over model of f32[4,64]                                               1.0 KiB       0 B   0.0 %
        in a branch of a cond that sends less than another: not counted
  tests/test_plan.py:NN: as written
    ppermute over data of f32[4,64]                                                  1.0 KiB   1.0 KiB   2.3 %
  tests/test_plan.py:NN: as written
    all_reduce over data,model of f32[]                                                  7 B       7 B   0.0 %

Totals                                                                                 times     total   share
    all_gather over model                                                                  1  32.1 KiB  74.5 %
    all_reduce over model                                                                  7   7.0 KiB  16.2 %
    all_reduce over data                                                                   2   3.0 KiB   7.0 %
    ppermute over data                                                                     1   1.0 KiB   2.3 %
    all_reduce over data,model                                                             1       7 B   0.0 %"""


def lines_hidden(text: str) -> str:
    """The lines of this file move when it is edited; as wide as they were."""
    return re.sub(r"\.py:\d+", ".py:NN", text)


def test_text():
    text = plan_with_embedding_moved().text()
    assert lines_hidden(text).startswith(GOLDEN)
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("width", [80, 120, 200])
def test_any_width(width):
    plan = plan_with_embedding_moved()
    lines = plan.text(width).splitlines()
    assert max(map(len, lines)) == min(width, MOST)
    assert sum(line.endswith(" 32.1 KiB") for line in lines) >= 1


LONG = "over dim 0 of " + " and ".join(f"the gradient's add_any at model.py:{i}" for i in range(8))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_reason_is_cut_and_code_only_where_it_must_be(width):
    """A long reason goes on in the next line; a line of code takes what room there is, and so does its table."""
    code = "y = " + " + ".join(f"x_{i}" for i in range(24))  # 147 columns with its line and the cells
    rows = (Row(LONG, remark=True), Row(LONG, ("1.0 KiB",)), Row("model.py:1", ("2.0 KiB",), code))
    table = Table("sent", (Group(f"model.py:2: {LONG}", rows),), ("each",))
    for text in (plain([table], width), re.sub("\x1b\\[[0-9;]*m", "", rich_text([table], width))):
        lines = text.splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        assert [i for i, line in enumerate(lines) if "…" in line] == (
            [] if width == 200 else [len(lines) - 1]
        )
        words = " ".join(" ".join(lines).replace("1.0 KiB", "").replace(" each", "").split())
        assert words.count(LONG) == 3
        assert (code in text) == (width == 200)


def test_summary():
    plan = plan_with_embedding_moved()
    lines = plan.summary(3).splitlines()
    assert lines[0] == plan.text().splitlines()[0]
    assert lines[2].startswith("Memory on each device: ")
    start = next(i for i, line in enumerate(lines) if line.startswith("The 3 dearest lines"))
    rows = [re.fullmatch(r"    (\S+ .*?)  +(\d+) +(\S+ \S*B) +(\S+) %", line) for line in lines[start + 1 :]]
    assert len(rows) == 4 and all(rows)
    assert [row[1].split(":")[0] for row in rows[:3]] == ["tests/test_plan.py"] * 3
    assert rows[3][1] == f"{len(sent_by_line(plan)) - 3} other lines"
    assert sum(int(row[2]) for row in rows) == sum(c.trips for c in plan.collectives if not c.other_branch)
    assert sum(float(row[4]) for row in rows) == pytest.approx(100, abs=0.3)
    sent = [comm_bytes(group) for group in sent_by_line(plan).values()]
    assert sent == sorted(sent, reverse=True) and sum(sent) == plan.comm_bytes
    assert "The lines that send something" in plan.summary(len(sent))
    with pytest.raises(
        ValueError, match=r"lines of Plan.summary is 0, of type int: give a number of lines, such as 10"
    ):
        plan.summary(0)


def test_on_a_terminal_rich_draws_the_same():
    tables_of = tables(plan_with_embedding_moved())
    drawn = re.sub("\x1b\\[[0-9;]*m", "", rich_text(tables_of, 110))
    assert "\x1b[1m" in rich_text(tables_of, 110)
    words = [" ".join(line.split()) for line in drawn.splitlines() if set(line.strip()) - {"─"}]
    expected = [" ".join(line.split()) for line in plain(tables_of, 110).splitlines() if line]
    assert words == expected


def test_at_rest():
    (embed,) = plan_with_embedding_moved().at_rest
    assert embed == AtRest(
        "argument 0/embed", (257, 64), Sharding((("model",), ())), Sharding(((), ("model",))), 257 * 32 * 4
    )


def test_comm_bytes():
    plan = make_plan()
    assert plan.comm_bytes == 257 * 32 * 4 + (LAYERS + 4) * 1024 + 1536 + 1024 + 1536 + 7


def test_equal_layers_and_moments_are_shown_once():
    """Ten layers; a subtree like another is named, one that differs is shown."""

    def scaled(state, x):
        for i in range(10):
            with jax.named_scope(f"all_reduce[params/layer_{i} in P()]"):
                x = lax.psum(x * state["params"][f"layer_{i}"], "data")
        return x

    params = {f"layer_{i}": BATCH for i in range(10)}
    split, whole = (dict.fromkeys(params, spec) for spec in (P("data"), P("model")))
    in_specs = ({"params": split, "same": split, "weights": whole}, P("data"))
    args = (dict.fromkeys(in_specs[0], params), BATCH)
    plan = make_plan(scaled, in_specs, P("data"), args)
    requested = Sharding((("data", "model"),))
    text = dataclasses.replace(
        plan, at_rest=tuple(AtRest.of("argument", p, requested) for p in list(plan.arguments())[:10])
    ).text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[2:10] == [
        "Arguments at rest: 656 B on each device",
        "P('model')",
        "0/weights/layer_{0..9} 10 x i32[16] 320 B",
        "P('data')",
        "0/params/layer_{0..9} 10 x i32[16] 160 B",
        "1 i32[16] 16 B",
        "as 0/params",
        "0/same 10 arrays 160 B",
    ]
    assert (
        "argument 0/params/layer_{0..9} 10 x [16]: requested P(('data', 'model')), stored as P('data') 0 B"
        in lines
    )
    assert any(line.endswith(": params/layer_{0..9} in P()") for line in lines)
    assert "10 x all_reduce over data of i32[4] 24 B 240 B 100.0 %" in lines


def test_a_program_that_sends_nothing():
    plan = make_plan(lambda x: 2 * x, P("data"), P("data"), (BATCH,))
    assert plan.text().startswith(
        "8 devices, mesh data=4, model=2. Each sends 0 B per call, in 0 collectives.\n\n"
        f"Arguments at rest: 16 B on each device\n  P('data')\n    {'-':<93}i32[16]  16 B\n\n"
        "Results at rest: 16 B on each device\n  1 are sharded as the arguments of the same paths\n"
    )


def test_keyword_arguments_follow_the_others():
    jaxpr = make_plan(lambda x, y: x + y, P("data"), P("data"), (BATCH, BATCH)).global_jaxpr
    data = NamedSharding(MESH, P("data"))
    plan = Plan(MESH, jaxpr, jaxpr, (data,), data, {"scale": data})
    assert [place.path for place in plan.arguments()] == ["0", "scale"]


def test_paths_and_avals_must_be_as_many():
    with pytest.raises(ValueError, match="shorter"):
        list(placed((NamedSharding(MESH, P()),), []))


def test_work():
    """Of products the FLOPs, with what they read and write; loops by their trips, of branches the dearest."""

    def f(a, b, image, kernel):
        c = lax.scan(lambda c, _: (c @ b, None), a, None, length=3)[0]
        d = lax.cond(c[0, 0] > 0, lambda c: c @ b, lambda c: c, c)
        return d, lax.conv_general_dilated(image, kernel, (1, 1), "SAME")

    shapes = [(8, 16), (16, 16), (2, 3, 10, 10), (5, 3, 3, 3)]
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    scanned, branch, conv = (w for w in work(jaxpr) if w.flops)
    assert (scanned.flops, scanned.trips, scanned.nbytes) == (2 * 8 * 16 * 16, 3, 4 * (128 + 256 + 128))
    assert (branch.flops, branch.trips) == (2 * 8 * 16 * 16, 1)
    assert conv.flops == 2 * (2 * 5 * 10 * 10) * (3 * 3 * 3)


def moved_bytes(fun, *shapes):
    jaxpr = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return sum(w.trips * w.nbytes for w in work(jaxpr))


def test_what_is_fused_moves_once():
    assert moved_bytes(lambda x: jnp.sin(x) * 2 + 1, (256,)) == 2 * 1024
    assert moved_bytes(lambda x: lax.sort(jnp.sin(x) * 2), (256,)) == 4 * 1024
    assert moved_bytes(lambda x, y: (x @ y).T, (8, 16), (16, 32)) == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_what_a_transpose_stores_of_a_product_is_written_while_it_computes():
    def works(fun):
        return list(
            work(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (16, 32)))))
        )

    assert works(lambda x, y: (x @ y).T) == works(lambda x, y: x @ y)


def test_slices_and_updates_move_only_their_part():
    assert moved_bytes(lambda x: lax.slice(x, (0,), (16,)), (256,)) == 2 * 64
    assert moved_bytes(lambda x, y: lax.dynamic_update_slice(x, y, (3,)), (256,), (16,)) == 2 * 64


def test_estimate():
    jaxpr = jax.make_jaxpr(jnp.matmul)(*[jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2)
    result = estimate(
        list(work(jaxpr)), [(10, Message("ppermute", ("x",), 10**8))], Network({"x": 16}, chips.V5E)
    )
    assert result.compute == pytest.approx(2 * 8192**3 / 197e12)
    assert result.memory == pytest.approx(3 * 2 * 8192**2 / 819e9)
    assert result.links == pytest.approx(0.01 + 10 * 1.1e-6)  # each starts, and goes one hop
    assert result.seconds == pytest.approx(result.compute + result.links)
    assert str(result) == (
        "0.0156 s on v5e, bound by links: 0.00558 s compute (1.1e+12 FLOPs), 0.000492 s HBM (4.03e+08 "
        "bytes), 0.01 s links"
    )


def test_estimate_of_a_plan():
    plan = make_plan()
    assert plan.estimate(chips.V5E) == plan.estimate("v5e")
    assert plan.estimate("v5e").links > plan.comm_bytes / 100e9
    free = dataclasses.replace(chips.V5E, latency=0.0, start=0.0, lanes=0)
    assert plan.estimate(free).links == pytest.approx(plan.comm_bytes / 100e9)
    with pytest.raises(
        ValueError, match="there is no such chip; give one of v3, v4, v5e, v5p, v6e, H100, H200"
    ):
        plan.estimate("v7")

"""Losses cut into stages, and where their values lie: on shapes, without devices."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.pipeline.cut import Piece, cut, stage
from shardax.pipeline.execute import _or_spare
from shardax.pipeline.halves import forward_half, halves
from shardax.pipeline.loss import value_and_grad
from shardax.pipeline.routes import routes
from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.slots import TO_SELF, WAYS, tables
from shardax.pipeline.slotting import places
from shardax.pipeline.stacks import Stacks

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype=np.dtype("float32"))


def loss(params, x_BM):
    """Six layers, tied ends, a value of the first layer that the end reads, a mask of nothing."""
    h_BM = x_BM @ params["in"]

    def layer(h_BM, w):
        return jnp.tanh(h_BM @ w), h_BM.sum()

    h_BM, sums = lax.scan(layer, h_BM, params["layers"].astype("bfloat16").astype("float32"))
    mask = lax.iota("float32", 8) < 4
    last = jnp.where(mask[None], h_BM @ params["in"].T, 0.0)
    return (last * x_BM).mean() + sums[0]


PARAMS = {"in": F32((8, 256)), "layers": F32((6, 256, 256))}
X = F32((64, 8))


def made(stages: int, fun=loss, params=PARAMS):
    return cut(
        jax.make_jaxpr(lambda *a: fun(jax.tree.unflatten(jax.tree.structure(params), a[:-1]), a[-1]))(
            *jax.tree.leaves(params), X
        ),
        len(jax.tree.leaves(params)),
        1,
        stages,
    )


def _run(stage, pieces, x, received):
    return stage.program(pieces, [x], [], received)


def hoisted(cut_):
    return jax.eval_shape(lambda *params: cut_.hoist(params, []), *jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_stages_fit_together(stages):
    """Each takes what the one before gives, and the last gives the loss."""
    found = made(stages)
    values = hoisted(found)
    received = ()
    for each in found.stages:
        assert received == each.received
        pieces = [
            values[p.value] if p.rows is None else F32((p.rows[1] - p.rows[0], 256, 256)) for p in each.pieces
        ]
        run = partial(_run, each)
        given = jax.eval_shape(run, pieces, X, received)
        received = tuple(F32(x.shape, x.dtype) if x.dtype != np.float32 else F32(x.shape) for x in given)
        assert received == each.sent
    assert received == (F32(()),)


def test_layers_are_dealt_out_evenly_and_casts_are_made_once():
    found = made(3)
    rows = [piece.rows for each in found.stages for piece in each.pieces if piece.rows]
    assert rows == [(0, 2), (2, 4), (4, 6)]
    values = hoisted(found)
    inside = []
    for each in found.stages:
        pieces = [values[p.value] if p.rows is None else F32((2, 256, 256)) for p in each.pieces]
        inside.append(str(jax.make_jaxpr(partial(_run, each))(pieces, X, each.received)))
    assert not any("bf16" in text for text in inside)
    assert [("iota" in text) for text in inside] == [False, False, True]  # made where it is read, not sent


def test_a_slower_stage_gets_fewer_layers():
    """Seven layers in three stages, the last of which has a large product besides."""

    def heavy(params, x_BM):
        h_BM = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_BM @ params["in"], params["layers"])[0]
        return (h_BM @ params["out"]).sum()

    params = {"in": F32((8, 256)), "layers": F32((7, 256, 256)), "out": F32((256, 1024))}
    found = made(3, heavy, params)
    layers = [sum(p.rows[1] - p.rows[0] for p in each.pieces if p.rows) for each in found.stages]
    assert sum(layers) == 7 and layers[2] < layers[0]
    assert max(each.seconds for each in found.stages) < 1.5 * sum(each.seconds for each in found.stages) / 3


def test_marks():
    def marked(params, x_BM):
        h_BM = stage(x_BM @ params["in"], "body")
        return (stage(jnp.tanh(h_BM @ params["layers"][0]), "head") @ params["in"].T).sum()

    assert [len(each.pieces) for each in made(3, marked).stages] == [1, 1, 1]
    with pytest.raises(
        ValueError, match=r"4 virtual stages need 3 marks at least, and the program has 2 \(body, head\)"
    ):
        made(4, marked)


def test_stacks_hold_what_is_alike_and_share_what_is_tied():
    found, schedule = made(3), make_schedule("1f1b", 3, 4)
    stacks = Stacks.of(found, schedule, hoisted(found))
    assert sorted((type.shape, held) for type, held in zip(stacks.types, stacks.is_stacked, strict=True)) == [
        ((2, 256, 256), True),
        ((8, 256), False),
        ((256, 8), False),
    ]
    assert [
        piece.rows
        for parts, held in zip(stacks.parts, stacks.is_stacked, strict=True)
        if held
        for piece in parts
    ] == [(0, 2), (2, 4), (4, 6)]
    assert Piece(0).rows is None


def test_halves_keep_nothing_that_is_there_anyway():
    """What a backward pass needs of weights, of the microbatch and of masks is not kept."""
    found = made(3)
    values = hoisted(found)
    last = found.stages[-1]
    pieces = [values[p.value] if p.rows is None else F32((2, 256, 256)) for p in last.pieces]
    both = halves(last, pieces, [X], [], last=True)
    shapes = Counter(kept.shape for kept in both.kept)
    assert (256, 8) not in shapes and (64, 8) not in shapes and (2, 256, 256) not in shapes
    assert all(kept.dtype != np.bool_ for kept in both.kept)
    assert forward_half(last, pieces, [X], []).kept == ()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "forward"])
@pytest.mark.parametrize("stages, microbatches", [(2, 3), (4, 8), (3, 7)])
def test_routes_bring_what_the_tables_say(name, stages, microbatches):
    """Each ppermute has one source and one destination for each stage; whatever arrives is stored in its slot."""
    table = tables(make_schedule(name, stages, microbatches))
    found = routes(table)
    assert all(
        len(dict(pairs)) == len(pairs) == len({d for _, d in pairs})
        for lanes in found.kinds
        for pairs in lanes
    )
    ways = {0: 1, 1: -1}
    for t in range(len(table.send)):
        lanes = [dict(pairs) for pairs in found.kinds[found.kind[t]]]
        for d in range(stages):
            stored = Counter(
                (sort, int(slot))
                for sort in ("forward", "cotangent")
                for slot in getattr(found, sort)[t, d]
                if slot >= 0
            )
            wanted = Counter(
                (sort, int(getattr(table, f"arriving_{sort}")[t, d, way]))
                for sort in ("forward", "cotangent")
                for way in WAYS
            )
            assert stored == Counter({key: n for key, n in wanted.items() if key[1] >= 0})
        for source, way in enumerate(table.send[t]):
            if way in ways:
                assert any(lane.get(source) == (source + ways[int(way)]) % stages for lane in lanes)
    assert found.lanes <= 2 and len(found.kinds) <= 8 and TO_SELF == 2


def test_places_are_as_few_as_the_longest_lists_need():
    a, b = F32((3,)), F32((3,), dtype=np.dtype("int32"))
    found = places([[a, b, a], [b, b], []])
    assert found.types == (a, a, b, b) and found.of == ((0, 2, 1), (2, 3), ())


def test_slots_that_nobody_reads():
    assert _or_spare(np.array([[-1, 0], [2, -1]]), [3, 1]).tolist() == [[3, 0], [2, 3]]


def test_without_a_mesh():
    with pytest.raises(ValueError, match="no mesh is in context"):
        value_and_grad(loss, microbatches=2)({}, np.ones((4, 2), "float32"))

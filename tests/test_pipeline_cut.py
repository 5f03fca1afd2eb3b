"""Losses cut into stages, and where their values lie: on shapes, without devices."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.pipeline.cut import Piece, stage
from shardax.pipeline.execute import _or_spare
from shardax.pipeline.loss import value_and_grad
from shardax.pipeline.region import Region
from shardax.pipeline.routes import routes
from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.slots import BACKWARD, FORWARD, TO_SELF, WAYS, tables
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


def region(fun=loss, params=PARAMS) -> Region:
    """Of the gradients of a loss."""
    leaves, tree = jax.tree.flatten(params)

    def step(*args):
        value, grads = jax.value_and_grad(lambda leaves: fun(jax.tree.unflatten(tree, leaves), args[-2]))(
            list(args[:-2])
        )
        return value, *grads

    closed = jax.make_jaxpr(step)(*leaves, X, jax.ShapeDtypeStruct((), "int32"))
    return Region(closed, len(leaves), 1, 1 + len(leaves))


def made(stages: int, fun=loss, params=PARAMS):
    return region(fun, params).cut(make_schedule("1f1b", stages, 4))


def hoisted(cut_):
    return jax.eval_shape(lambda *params: cut_.hoist(params, []), *jax.tree.leaves(PARAMS))


def passes(stages: int):
    """Of each stage, and what it reads of the parameters."""
    found = region()._at(make_schedule("1f1b", stages, 4))
    return found.passes(), found.piece_types()


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_stages_fit_together(stages):
    """What one sends the next receives, forward and backward, and each has its part of the results."""
    found, pieces = passes(stages)
    sums = []
    for own, types in zip(found, pieces, strict=True):
        forward, backward = own.of[FORWARD], own.of[BACKWARD]
        assert forward.closed.in_avals[: len(types)] == backward.closed.in_avals[: len(types)]
        assert len(forward.closed.in_avals) == len(types) + 2 + len(own.received)
        sums += [*forward.sums, *backward.sums]
    assert not found[0].received and not found[0].returned
    assert sorted(sums) == [0, 1, 2]  # none twice


def test_layers_are_dealt_out_evenly_and_casts_are_made_once():
    found = made(3)
    rows = [piece.rows for each in found.stages for piece in each.pieces if piece.rows]
    assert rows == [(0, 2), (2, 4), (4, 6)]
    inside = [str(each.of[FORWARD].closed) for each in passes(3)[0]]
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


def test_marks():
    def marked(params, x_BM):
        h_BM = stage(x_BM @ params["in"], "body")
        return ((stage(jnp.tanh(h_BM @ params["layers"][0]), "head") @ params["in"].T) ** 2).sum()

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
        ((8, 256), False),  # as both ends read it
    ]
    assert [
        piece.rows
        for parts, held in zip(stacks.parts, stacks.is_stacked, strict=True)
        if held
        for piece in parts
    ] == [(0, 2), (2, 4), (4, 6)]
    assert Piece(0).rows is None


def test_nothing_is_kept_that_is_there_anyway():
    """Of what a backward pass needs, weights, the microbatch and masks."""
    kept = passes(3)[0][-1].kept
    shapes = Counter(type.shape for type in kept)
    assert shapes and not {(256, 8), (64, 8), (2, 256, 256)} & set(shapes)
    assert all(type.dtype != np.bool_ for type in kept)


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

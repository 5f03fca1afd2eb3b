"""Of which leaves the stages' pieces are made, and in which arrays they rest; without devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.pipeline.cut import Piece
from shardax.pipeline.origins import Origin, Reads, run, text
from shardax.pipeline.packed import FLAT, STACKED, WHOLE, Packed, Part
from shardax.pipeline.packer import packing_of
from shardax.pipeline.region import Region
from shardax.pipeline.repacking import leaves_of
from shardax.pipeline.resting import Weights, accumulators, gathered
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.stacks import Held
from shardax.pipeline.table import loop
from tests.numpy_programs import evaluate

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype=np.dtype("float32"))
M = 4
X = F32((8, M))
ORIGIN = {"a": F32((2, 3)), "b": F32((2, 3))}


def cut_of(loss, params, stages: int):
    leaves, tree = jax.tree.flatten(params)
    number = jax.ShapeDtypeStruct((), "int32")
    closed = jax.make_jaxpr(lambda *a: loss(jax.tree.unflatten(tree, a[:-2]), a[-2]))(*leaves, X, number)
    region = Region(closed, len(leaves), 1, 1, forward=True)
    return region.cut(make_schedule("forward", stages, 4, backward=False))


def scanned(params, x):
    """A first matrix, five layers, a last matrix; the scale is read by both ends."""
    h = x * params["scale"].reshape(1, -1) @ params["in"]
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, 2.0 * params["layers"])
    return (h @ params["out"].T * params["scale"].reshape(1, -1)).sum()


PARAMS = {"in": F32((M, M)), "layers": F32((4, M, M)), "out": F32((M, M)), "scale": F32((M,))}
IN, LAYERS, OUT, SCALE = range(4)


def reads_of(loss=scanned, params=PARAMS, stages: int = 2) -> Reads:
    schedule = make_schedule("1f1b", stages, 4)
    return Reads.of(cut_of(loss, params, stages), schedule, jax.tree.leaves(params), [])


# origins


def test_a_piece_has_the_leaf_that_it_is_made_of():
    found = reads_of()
    assert all(read.stage == read.virtual == k for k, some in enumerate(found.by_virtual) for read in some)
    leaves = [sorted((r.origin.leaf, r.rows) for r in some) for some in found.by_virtual]
    first, last = ({leaf: rows for leaf, rows in some} for some in leaves)
    assert set(first) == {IN, LAYERS, SCALE} and set(last) == {OUT, LAYERS, SCALE}
    assert first[LAYERS] == (0, 2) and last[LAYERS] == (2, 4) and first[IN] is last[OUT] is None
    assert len(found.all) == 6 and not found.others


def test_what_is_of_several_leaves_or_no_linear_chain_has_no_origin():
    """And nothing that is not zero where the leaf is zero: the leaves of it are the others."""
    made = {
        "sum": lambda p: p["a"] + p["b"],
        "shift": lambda p: p["a"] + 1.0,
        "inverse": lambda p: 1.0 / p["a"],
        "half": lambda p: p["a"][:1],
        "repeated": lambda p: 2.0 * jnp.broadcast_to(p["a"], (4, 2, 3)),
    }
    wanted = {"sum": {0, 1}, "shift": {0}, "inverse": {0}, "half": {0}, "repeated": {0}}
    for name, make in made.items():
        found = reads_of(lambda p, x, make=make: (jnp.tanh(x.sum()) * make(p)).sum(), ORIGIN, 1)
        assert [read.origin for read in found.all] == [None], name
        assert found.others == wanted[name], name


def origins(make):
    found = reads_of(lambda p, x: (jnp.tanh(x[:2, :3].sum()) * make(p["b"])).sum(), ORIGIN, 1)
    return [read.origin for read in found.all]


def test_a_chain_does_to_an_array_what_it_does_to_the_leaf():
    (origin,) = origins(lambda b: (-b.T).reshape(6) * 3.0)
    assert origin.leaf == 1 and origin.shape == (6,)
    assert [eqn.primitive.name for eqn in origin.chain] == ["transpose", "neg", "reshape", "mul"]
    assert [eqn.primitive.name for eqn in origin.elementwise] == ["neg", "mul"]
    b = np.arange(6, dtype="float32").reshape(2, 3)
    (found,) = evaluate(jax.make_jaxpr(lambda b: run(origin.chain, b))(b), [b])
    np.testing.assert_array_equal(found, (-b.T * 3).reshape(6))


def test_chains_are_of_kinds():
    (origin,) = origins(lambda b: b.reshape(6) * 3.0)
    assert origin.keeps_order and not origin.is_elementwise


def test_the_text_of_a_chain_tells_chains_apart():
    scaled, again, other, cast = (
        text(origins(make)[0].chain)
        for make in (
            lambda b: b * 3.0,
            lambda b: b * 3.0,
            lambda b: b * 2.0,
            lambda b: b.astype("bfloat16").astype("float32"),
        )
    )
    assert scaled == again and len({scaled, other, cast}) == 3


# packer


def packing(loss=scanned, params=PARAMS, stages: int = 2, **said):
    schedule = make_schedule("1f1b", stages, 4)
    return packing_of(cut_of(loss, params, stages), schedule, params, [], "stage", **said)


def kinds(found):
    return {(each.kind, each.parts, each.shape) for each in found.arrays}


def test_rows_of_layers_rest_with_their_stages():
    """What both ends read rests as it is; a matrix of each stage makes one array."""
    assert kinds(packing()) == {
        (STACKED, ((Part(LAYERS, (0, 2)),), (Part(LAYERS, (2, 4)),)), (2, M, M)),
        (STACKED, ((Part(IN),), (Part(OUT),)), (M, M)),
        (WHOLE, ((Part(SCALE),),), (M,)),
    }


def test_uneven_rows_are_as_long_as_the_longest():
    params = PARAMS | {"layers": F32((5, M, M))}
    (layers,) = (each for each in packing(params=params).arrays if each.parts[0][0].leaf == LAYERS)
    counts = [part.rows[1] - part.rows[0] for parts in layers.parts for part in parts]
    assert sum(counts) == 5 and layers.shape == (max(counts), M, M)


def biased(params, x):
    """Biases of different sizes, each read by one stage alone."""
    h = x[:, :2] + params["a"].reshape(1, -1)
    h = jnp.tanh(h @ params["w"])
    return (h + params["b"].reshape(1, -1)).sum()


BIASED = {"a": F32((2,)), "b": F32((3,)), "w": F32((2, 3))}


def test_what_differs_from_stage_to_stage_rests_in_a_flat_array():
    found = packing(biased, BIASED)
    (flat,) = (each for each in found.arrays if each.kind == FLAT)
    sizes = [2, 3, 6]
    ends = [max(part.start + sizes[part.leaf] for part in parts) for parts in flat.parts]
    assert flat.shape == (max(ends),) and sum(ends) == 11
    assert sorted(part.leaf for parts in flat.parts for part in parts) == [0, 1, 2]


def test_labels_and_specs_keep_leaves_apart():
    labels = dict.fromkeys(PARAMS, "decayed") | {"out": "other"}
    assert (STACKED, ((Part(IN),), (Part(OUT),)), (M, M)) not in kinds(packing(labels=labels))
    specs = dict.fromkeys(PARAMS, P()) | {"out": P("model")}
    found = packing(specs=specs)
    assert (STACKED, ((Part(IN),), (Part(OUT),)), (M, M)) not in kinds(found)
    assert P("model") in {each.spec for each in found.arrays}


def test_the_axis_of_stages_is_not_for_specs():
    with pytest.raises(ValueError, match="'stage' is the axis of stages, along which the packing itself"):
        packing(specs=dict.fromkeys(PARAMS, P("stage")))


# resting


def at_rest(loss=scanned, params=PARAMS):
    """The parameters in their arrays, as types, and the cut whose stages read those."""
    found, schedule = packing(loss, params), make_schedule("1f1b", 2, 4)
    types = [F32(each.shape if each.kind == WHOLE else (2, *each.shape)) for each in found.arrays]
    weights = Weights.of([Packed(types, found)], 2, "stage")
    return weights, types, cut_of(loss, params, 2), schedule


def own(values, pieces, k: int):
    """What stage k reads of the hoisted values."""
    return [
        values[p.value][k][: p.count] if isinstance(p, Held) else values[p.value][slice(*(p.rows or (None,)))]
        for p in pieces
    ]


@pytest.mark.parametrize("loss, params", [(scanned, PARAMS), (biased, BIASED)])
def test_stages_take_the_same_out_of_arrays_at_rest(loss, params):
    weights, types, plain, schedule = at_rest(loss, params)
    placed = weights.placed(plain, schedule, [])

    def taken(made, hoisted):
        return [stage.taken(own(hoisted, stage.pieces, k)) for k, stage in enumerate(made.stages)]

    def resting(*arrays):
        return jax.tree.leaves(taken(placed, placed.hoist(arrays, [])))

    def unpacked(*arrays):
        leaves = leaves_of(Packed(arrays, weights.arguments[0].packing))
        return jax.tree.leaves(taken(plain, plain.hoist(leaves, [])))

    random = np.random.RandomState(0)
    arrays = [random.randn(*type.shape).astype("float32") for type in types]
    found, wanted = (evaluate(jax.make_jaxpr(f)(*arrays), arrays) for f in (resting, unpacked))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert not any(
        piece.rows for stage in placed.stages for piece in stage.pieces if isinstance(piece, Piece)
    )


@pytest.mark.parametrize("loss, params", [(scanned, PARAMS), (biased, BIASED)])
def test_gradients_rest_where_their_leaves_do(loss, params):
    """Those of a stage's parts are added up in one array each, none twice; the others are packed."""
    weights, _, _, _ = at_rest(loss, params)
    count = len(weights.types)
    origins = [[Origin(leaf, (), tuple(type.shape))] for leaf, type in enumerate(weights.types)]
    packing = weights.arguments[0].packing
    found, arrays = accumulators(packing, origins), packing.arrays
    assert set(found) == {i for i, each in enumerate(arrays) if each.kind != WHOLE}
    for number, (accumulator, chain) in found.items():
        assert accumulator.shape == arrays[number].shape and chain == ()
        parts = [[(p.number, p.rows, p.start) for p in some] for some in accumulator.parts]
        assert parts == [[tuple(p) for p in some] for some in arrays[number].parts]
    assert not accumulators(packing, [[]] * count)
    leaves = [np.full(type.shape, i, "float32") for i, type in enumerate(weights.types)]
    made = jax.eval_shape(lambda *leaves: gathered(packing, leaves, {}), *leaves)
    assert [x.shape for x in made] == [x.shape for x in weights.arrays]


def test_weights_are_those_of_the_function():
    weights, types, plain, schedule = at_rest()
    assert weights.types == jax.tree.leaves(PARAMS) and len(weights.arrays) == len(types)
    made = jax.eval_shape(weights.plain, types)
    assert [x.shape for x in made] == [x.shape for x in jax.tree.leaves(PARAMS)]
    unpacked = Weights.of([PARAMS], 2, "stage")
    assert unpacked.placed(plain, schedule, []) is plain


def test_arrays_rest_for_their_own_stages_alone():
    weights, *_ = at_rest()
    with pytest.raises(ValueError, match="packed for 2 stages along 'stage', and the pipeline has 4"):
        Weights.of(weights.arguments, 4, "stage")


def test_chunks_rest_apart():
    """Of an interleaved schedule, an array for each chunk."""

    def layers(params, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0].sum()

    schedule, params = make_schedule("interleaved", 2, 4), F32((4, M, M))
    assert schedule.placement == loop(2, 2)
    found = packing_of(cut_of(layers, params, 4), schedule, params, [], "stage")
    rows = [[part.rows for parts in each.parts for part in parts] for each in found.arrays]
    assert rows == [[(0, 1), (1, 2)], [(2, 3), (3, 4)]]

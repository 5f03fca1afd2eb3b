"""Candidates: every way to split a rule's factors that layouts suggest can be laid out, and none is missing."""

import itertools
from functools import partial

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax.partition import candidates
from shardax.partition.candidates import (
    Offer,
    assignments,
    candidate_of,
    compatible,
    options_of,
    suggest,
    waits,
    whole,
)
from shardax.sharding import Padding, Sharding
from shardax.spmd_rules.localize import fits, reduced_pending
from shardax.spmd_rules.registry import LINEAR, MOVES, Split
from shardax.spmd_rules.rule import Factors, bind, parse
from tests.choices import SIZES, layout

pytestmark = pytest.mark.quick

AXES = tuple(SIZES)
PADDING = Padding(SIZES)
CASES = {
    "product": ("m k+, k+ n -> m n", ((10, 16), (16, 9)), ((10, 9),)),
    "batched product": ("b m k+, b k+ n -> b m n", ((4, 8, 16), (4, 16, 8)), ((4, 8, 8),)),
    "reduction": ("a k:max -> a", ((12, 7),), ((12,),)),
    "reshape": ("(h w) c -> h w c", ((24, 5),), ((6, 4, 5),)),
    "unsplit": ("a b! -> a b!", ((10, 16),), ((10, 16),)),
    "window": ("h~ c -> h~ c", ((16, 6),), ((14, 6),)),
    "diagonal": ("i i -> i", ((8, 8),), ((8,),)),
}


def factors_of(name: str) -> Factors:
    text, *shapes = CASES[name]
    return bind(parse(text), *shapes)


def random_layouts(name: str, seed: int) -> list:
    """Two layouts of each tensor, each dim split over up to two axes."""
    _, operands, results = CASES[name]
    rng = np.random.default_rng(seed)

    def one(shape):
        axes = iter(rng.permutation(AXES).tolist())
        dims = [tuple(itertools.islice(axes, int(rng.integers(0, 3)))) for _ in shape]
        return PADDING.layout(Sharding(tuple(dims)), shape)

    return [[one(shape), one(shape)] for shape in (*results, *operands)]


class Space:
    """What layouts suggest for a rule."""

    def __init__(self, name: str, layouts, offer=Offer(reduced=True)):  # noqa: B008  (frozen)
        self.factors = factors_of(name)
        tensors = self.factors.results + self.factors.operands
        self.suggestions = suggest(layouts, tensors, self.factors, PADDING, offer)
        self.options = options_of(self.suggestions, self.factors, PADDING)
        each = partial(whole, layouts, tensors, self.factors, SIZES)
        self.ways = list(assignments(self.options, self.factors, SIZES, each))


def spaces():
    return [(name, seed) for name in CASES for seed in range(6)]


@pytest.mark.parametrize("name, seed", spaces())
def test_every_candidate_can_be_laid_out(name, seed):
    """No axis splits a tensor twice, or splits what owes a sum over it; blocks are equal and hold all."""
    factors = factors_of(name)
    for splits in Space(name, random_layouts(name, seed)).ways:
        found = candidate_of(factors, splits, (), ())
        shapes = (*CASES[name][1], *CASES[name][2])
        for made, shape in zip((*found.operands, *found.results), shapes, strict=True):
            axes = (*made.sharding.axes, *made.pending_axes)
            assert len(set(axes)) == len(axes)
            blocks = zip(made.padded, made.local_shape(SIZES), made.dims, strict=True)
            assert all(n == rows * np.prod([SIZES[a] for a in axes], dtype=int) for n, rows, axes in blocks)
            assert all(n >= size for n, size in zip(made.padded, shape, strict=True))


@pytest.mark.parametrize("name, seed", spaces())
def test_every_suggested_split_is_among_the_options(name, seed):
    layouts = random_layouts(name, seed)
    space = Space(name, layouts)
    offered = {(f, split) for group in space.options for way in group for f, split in way.items()}
    assert {(f, split) for f, of_factor in space.suggestions.items() for split in of_factor} <= offered
    kept = {f for f in space.factors.sizes if space.factors.type_of(f) != "unsplit"}
    tensors = zip(layouts, space.factors.results + space.factors.operands, strict=True)
    for of_tensor, dims in tensors:
        for made, (d, dim) in itertools.product(of_tensor, enumerate(dims)):
            if len(dim) == 1 and dims.count(dim) == 1 and dim[0] in kept and made.dims[d]:
                assert Split(made.dims[d], made.padded[d]) in space.suggestions[dim[0]]


@pytest.mark.parametrize("name, seed", spaces())
def test_to_the_first_nothing_can_be_added(name, seed):
    space = Space(name, random_layouts(name, seed))
    first, last = space.ways[0], space.ways[-1]
    assert last == {}
    for way in itertools.chain.from_iterable(space.options):
        more = {**first, **way}
        added = first.keys().isdisjoint(way) and compatible(space.factors, more, ())
        assert not (added and fits(space.factors, more, SIZES))


@pytest.mark.parametrize("name, seed", spaces())
def test_none_that_fits_is_missing(name, seed):
    space = Space(name, random_layouts(name, seed))
    every = [
        {f: split for way in ways for f, split in way.items()}
        for ways in itertools.product(*([*ways, {}] for ways in space.options))
    ]
    fitting = [s for s in every if compatible(space.factors, s, ()) and fits(space.factors, s, SIZES)]
    if (name, seed) == ("batched product", 4):  # more than there is patience for
        assert len(every) > 256 and all(s in fitting for s in space.ways)
        return
    assert len(every) <= 256 and all(s in space.ways for s in fitting)
    assert all(s in fitting and space.ways.count(s) == 1 for s in space.ways)


@pytest.mark.parametrize("name", CASES)
def test_compatible_is_what_uses_no_axis_twice(name):
    """On no tensor, what it owes among it."""
    factors, rng, seen = factors_of(name), np.random.default_rng(0), set()
    for _ in range(200):
        some = {f: tuple(rng.permutation(AXES)[: rng.integers(3)].tolist()) for f in factors.sizes}
        splits = {f: Split(axes, 48) for f, axes in some.items() if axes}
        pending = tuple((a, "sum") for a in AXES if rng.random() < 0.2)
        owed = [axis for axis, _ in (*reduced_pending(factors, splits), *pending)]
        tensors = [
            [a for dim in dims for f in dim if f in splits for a in splits[f].axes]
            + (owed if i >= len(factors.operands) else [axis for axis, _ in pending])
            for i, dims in enumerate((*factors.operands, *factors.results))
        ]
        wanted = all(len(set(axes)) == len(axes) for axes in (owed, *tensors))
        assert compatible(factors, splits, pending) == wanted
        seen.add(wanted)
    assert seen == {True, False}


def test_where_there_are_too_many_what_each_layout_suggests_is_among_them(monkeypatch):
    monkeypatch.setattr(candidates, "_MOST_CANDIDATES", 4)
    layouts = [[layout(s, (4, 8, 8))] for s in (P("x"), P(None, "y"), P(None, None, "z"))]
    layouts[1:] = [[layout(s, n)] for s, n in ((P("y", "x"), (4, 8, 16)), (P("z", None, "x"), (4, 16, 8)))]
    ways = Space("batched product", layouts).ways
    assert {"b": Split(("y",), 4), "m": Split(("x",), 8)} in ways and ways[-1] == {}
    assert {"b": Split(("z",), 4), "n": Split(("x",), 8)} in ways and len(ways) <= 1 + 3 + 4 + 1


def test_windowed_dims_are_split_over_the_same_axes():
    ways = Space("window", [[layout(P("y"), (14, 6))], [layout(P("x"), (16, 6))]]).ways
    split = [tuple(way[f].axes for f in ("h~14", "h~16") if f in way) for way in ways]
    own, both = {(("x",),), (("y",),)}, {(("x",),) * 2, (("y",),) * 2}
    assert set(split) - {()} == own | both  # of the operand, parts may be cut out
    assert all("h~14" in way for way in ways if "h~16" in way)
    blocks = {way["h~14"].padded for way in ways if "h~14" in way and way["h~14"].axes == ("x",)}
    assert blocks == {16}  # four blocks of four, its own and those of the other


def test_axes_of_tokens_go_to_experts_that_all_share():
    layouts = [
        [layout(P(), (4, 8, 8))],
        [layout(P(None, "x"), (4, 8, 16))],
        [layout(P("y"), (4, 16, 8))],
    ]
    assert Split(("y", "x"), 4) not in Space("batched product", layouts).suggestions["b"]
    shared = Space("batched product", layouts, Offer(shared=True)).suggestions
    assert Split(("x",), 4) in shared["b"] and Split(("y",), 16) not in shared.get("n", [])


def test_axes_of_what_must_be_whole_go_to_another_dim():
    ways = Space("unsplit", [[layout(P(), (10, 16))], [layout(P(None, "x"), (10, 16))]]).ways
    assert ways[0] == {"a": Split(("x",), 12)} and all("b" not in way for way in ways)


def test_idle_axes_split_a_dim_that_nobody_splits():
    layouts = [[layout(P(), (12,))], [layout(P("x"), (12, 7))]]
    assert {"a": Split(("x", "y"), 16)} not in Space("reduction", layouts).ways
    assert {"a": Split(("x", "y"), 16)} in Space("reduction", layouts, Offer(idle=("y",))).ways


def test_pending_operands_wait_together_each_alone_or_not_at_all():
    some = [layout(P(), (8,), "x")], [layout(P(), (8,), "y"), layout(P(), (8,))]
    x, y = ("x", "sum"), ("y", "sum")
    together = [((0, 1), (x, y)), ((0, 1), (x,)), ((0, 1), (y,)), ((), ())]
    assert list(waits([LINEAR(0, 1)], some)) == together
    assert list(waits([LINEAR(0), LINEAR(1)], some)) == [((0,), (x,)), ((1,), (y,)), ((), ())]


def test_one_axis_owes_one_reduction():
    most = PADDING.layout(Sharding(((),)), (8,), (("x", "max"),))
    some = [layout(P(), (8,), "x")], [most]
    assert ((0, 1), (("x", "sum"), ("x", "max"))) not in waits([MOVES(0, 1)], some)
    assert list(waits([LINEAR(0, 1)], some)) == [((0, 1), (("x", "sum"),)), ((), ())]


def test_results_owe_what_operands_bring_and_what_is_reduced():
    factors, splits = factors_of("product"), {"k": Split(("x",), 16)}
    found = candidate_of(factors, splits, (0,), (("z", "sum"),))
    assert [made.pending_axes for made in found.operands] == [("z",), ()]
    assert [made.pending_axes for made in found.results] == [("x", "z")]
    assert not compatible(factors, {"m": Split(("z",), 10)}, (("z", "sum"),))

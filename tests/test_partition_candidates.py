"""Candidates: every way to split a rule's factors that layouts suggest can be laid out, and none is missing."""

import itertools
from functools import partial

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax.partition import candidates
from shardax.partition.candidates import (
    BUSY,
    Offer,
    assignments,
    candidate_of,
    compatible,
    in_order,
    is_many,
    options_of,
    suggest,
    waits,
    whole,
)
from shardax.sharding import Padding, Sharding, shard_count
from shardax.spmd_rules.localize import fits, reduced_pending
from shardax.spmd_rules.registry import LINEAR, MOVES, Split
from shardax.spmd_rules.rule import KEEP, Factors, bind, parse
from tests.choices import SIZES, layout

pytestmark = pytest.mark.quick

AXES = tuple(SIZES)
NONE, ALL = Offer(), Offer(AXES)
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
    """What layouts and the axes on offer suggest for a rule."""

    def __init__(self, name: str, layouts, offer=ALL):
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
@pytest.mark.parametrize("offer", [NONE, ALL])
def test_to_the_first_nothing_can_be_added(name, seed, offer):
    """But to what each layout suggests, which comes before where there are too many."""
    space = Space(name, random_layouts(name, seed), offer)
    ways = list(assignments(space.options, space.factors, SIZES, list))
    first, last = ways[0], ways[-1]
    assert last == {} == space.ways[-1]
    for way in itertools.chain.from_iterable(space.options):
        more = {**first, **way}
        added = first.keys().isdisjoint(way) and compatible(space.factors, more, ())
        assert not (added and fits(space.factors, more, SIZES))


@pytest.mark.parametrize("name, seed", spaces())
@pytest.mark.parametrize("offer", [NONE, ALL])
def test_none_that_fits_is_missing(name, seed, offer):
    """Also where all combinations are too many, few of them can be laid out. Each comes once, if they are not."""
    space = Space(name, random_layouts(name, seed), offer)
    every = [
        {f: split for way in ways for f, split in way.items()}
        for ways in itertools.product(*([*ways, {}] for ways in space.options))
    ]
    fitting = [s for s in every if compatible(space.factors, s, ()) and fits(space.factors, s, SIZES)]
    assert all(s in space.ways for s in fitting) and all(s in fitting for s in space.ways)
    assert is_many(space.options) == (len(every) > 256)
    assert is_many(space.options) or all(space.ways.count(s) == 1 for s in space.ways)


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
    for offer in (NONE, ALL):
        ways = Space("batched product", layouts, offer).ways
        assert {"b": Split(("y",), 4), "m": Split(("x",), 8)} in ways and ways[-1] == {}
        assert {"b": Split(("z",), 4), "n": Split(("x",), 8)} in ways and len(ways) <= 3 + 4 + 1


def test_windowed_dims_are_split_over_the_same_axes():
    layouts = [[layout(P("y"), (14, 6))], [layout(P("x"), (16, 6))]]
    offered = [("x", "y", "z"), ("y", "x", "z"), ("z",)]
    for offer, axes in ((NONE, [("x",), ("y",)]), (ALL, [("x",), ("y",), *offered])):
        ways = Space("window", layouts, offer).ways
        split = [tuple(way[f].axes for f in ("h~14", "h~16") if f in way) for way in ways]
        own, both = {(a,) for a in axes}, {(a, a) for a in axes}
        assert set(split) - {()} == own | both  # of the operand, parts may be cut out
        assert all("h~14" in way for way in ways if "h~16" in way)
        blocks = {way["h~14"].padded for way in ways if "h~14" in way and way["h~14"].axes == ("x",)}
        assert blocks == {16}  # four blocks of four, its own and those of the other


def test_axes_on_offer_split_together_with_the_others_or_alone():
    """All of them; those that split a dim somewhere, alone and with all others; each."""
    some = ("x", "z"), ("y",)
    assert ALL.groups([]) == [("x", "y", "z"), ("x",), ("y",), ("z",)]
    assert ALL.groups(some) == [
        ("x", "y", "z"),
        *(("x", "z"), ("y",)),
        *(("x", "z", "y"), ("y", "x", "z")),
        *(("x",), ("z",)),
    ]
    assert Offer(("x",)).groups([("y",)]) == [("x",), ("y",), ("y", "x")]


def test_axes_that_are_one_go_together():
    offer = Offer(AXES, whole=(("x", "y"),))
    assert offer.groups([]) == [("x", "y", "z"), ("x", "y"), ("z",)]
    apart = offer.groups([("y",)])  # some layout has it so in any case
    assert ("y",) in apart and ("x",) not in apart


@pytest.mark.parametrize("name, seed", spaces())
def test_every_axis_on_offer_may_split_every_dim(name, seed):
    """Whatever splits it now, so that not fewer than one device in eight gets an element."""
    layouts = random_layouts(name, seed)
    space = Space(name, layouts)
    every = [AXES, *((a,) for a in AXES)]
    for of_tensor, dims in zip(layouts, space.factors.results + space.factors.operands, strict=True):
        for made, (d, dim) in itertools.product(of_tensor, enumerate(dims)):
            if len(dim) == 1 and dims.count(dim) == 1 and made.dims[d]:
                every += [made.dims[d], made.dims[d] + tuple(a for a in AXES if a not in made.dims[d])]
    kept = {f: n for f, n in space.factors.sizes.items() if space.factors.type_of(f) == KEEP}
    for (factor, size), axes in itertools.product(kept.items(), every):
        assert BUSY * size >= shard_count(axes, SIZES)
        assert Split(axes, PADDING.padded(size, axes)) in space.suggestions[factor]


@pytest.mark.parametrize("name, seed", spaces())
def test_axes_that_are_not_on_offer_split_what_they_split_in_some_layout(name, seed):
    """With nothing on offer a dim is split as a layout has it; one that cannot be split loses its axes."""
    layouts = random_layouts(name, seed)
    few, more = (Space(name, layouts, offer).suggestions for offer in (NONE, Offer(("z",))))
    have = {dim for of_tensor in layouts for made in of_tensor for dim in made.dims if dim}
    parts = {axes[i:j] for axes in have for j in range(len(axes) + 1) for i in range(j)}
    assert {split.axes for splits in few.values() for split in splits} <= parts
    assert few.keys() <= more.keys() and all(set(few[f]) <= set(more[f]) for f in few)
    added = {split.axes for f in more for split in more[f] if split not in few.get(f, [])}
    assert all(axes in parts or axes[-1] == "z" for axes in added)


def test_few_elements_are_not_offered_to_many_devices():
    """To no more than eight for each, one to none at all. What is reduced is split as a layout has it."""
    many, x, y, both = Padding({"x": 16, "y": 2}), ("x",), ("y",), ("x", "y")
    for size, offered in ((1, {}), (2, {"a": {x, y}}), (4, {"a": {both, x, y}})):
        factors = bind(parse("a k+ -> a"), ((size, 64),), ((size,),))
        found = suggest([[], []], factors.results + factors.operands, factors, many, Offer(both))
        assert {factor: {split.axes for split in splits} for factor, splits in found.items()} == offered


def test_axes_of_what_must_be_whole_go_to_another_dim():
    layouts = [[layout(P(), (10, 16))], [layout(P(None, "x"), (10, 16))]]
    ways = Space("unsplit", layouts, NONE).ways
    assert ways == [{"a": Split(("x",), 12)}, {}]
    more = Space("unsplit", layouts).ways
    assert all(way in more for way in ways) and all("b" not in way for way in more)


def test_they_do_so_where_fewer_than_an_eighth_of_the_devices_have_an_element():
    """There may be no other way; other axes that may not are not offered then."""
    sizes, factors = {"x": 16, "y": 16}, bind(parse("a b! -> a b!"), ((2, 64),), ((2, 64),))
    layouts = [[layout(spec, (2, 64), sizes=sizes)] for spec in (P(), P(None, ("x", "y")))]
    tensors = factors.results + factors.operands
    for specs, offered in ((layouts, {("x", "y"), ("x",), ("y",)}), (layouts[:1] * 2, {("x",), ("y",)})):
        found = suggest(specs, tensors, factors, Padding(sizes), Offer(("x", "y")))
        assert found.keys() == {"a"} and {split.axes for split in found["a"]} == offered


def test_idle_axes_split_a_dim_that_nobody_splits():
    layouts = [[layout(P(), (12,))], [layout(P("x"), (12, 7))]]
    assert {"a": Split(("x", "y"), 16)} not in Space("reduction", layouts, NONE).ways
    assert {"a": Split(("x", "y"), 16)} in Space("reduction", layouts, Offer(("y",))).ways


@pytest.mark.parametrize("name, seed", spaces())
def test_whoever_suggested_first_they_come_in_one_order(name, seed):
    layouts = random_layouts(name, seed)
    first, last = (
        in_order(Space(name, [of_tensor[::step] for of_tensor in layouts]).suggestions) for step in (1, -1)
    )
    assert first == last and list(first) == list(last) == sorted(first)
    for splits in first.values():
        assert [len(split.axes) for split in splits] == sorted([len(s.axes) for s in splits], reverse=True)


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

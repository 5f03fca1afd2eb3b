"""Paths between layouts: cheapest against an exhaustive search, right when executed, and the known cases by
name.
"""

import itertools
import math
import os
import random
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import shardax as sx
from shardax.cost import chips
from shardax.cost.chips import NOMINAL
from shardax.cost.network import PICO, Network
from shardax.reshard import paths, reach, run, steps
from shardax.reshard.halo import exchange_of
from shardax.sharding import Layout, Padding, Sharding, from_spec, minor_most, round_up, shard_count

pytestmark = pytest.mark.quick

MESHES = {
    "x8": {"x": 8},
    "x4y2": {"x": 4, "y": 2},
    "x2y3": {"x": 2, "y": 3},
    "x2y2z2": {"x": 2, "y": 2, "z": 2},
    "x1y4z2": {"x": 1, "y": 4, "z": 2},
}


# Executed


def random_layout(rng, shape, sizes, kinds):
    """Each axis splits a dim, or is pending, or is unused; a split dim is padded as little as possible, or a
    little more.
    """
    dims, pending = [()] * len(shape), []
    kind = rng.choice(kinds) if kinds else None
    for axis in rng.sample(list(sizes), len(sizes)):
        place = rng.choice([*range(len(shape)), *range(len(shape)), "pending", None])
        if place == "pending" and kind:
            pending.append((axis, kind))
        elif isinstance(place, int):
            dims[place] += (axis,)
    more = [rng.choice([0, 0, 1]) for _ in shape]
    padded = [
        round_up(n, shard_count(axes, sizes)) + m * shard_count(axes, sizes) if axes else n
        for n, axes, m in zip(shape, dims, more, strict=True)
    ]
    return Layout(Sharding(tuple(dims)), tuple(padded), tuple(pending))


def coordinates(sizes):
    return [dict(zip(sizes, c, strict=True)) for c in itertools.product(*map(range, sizes.values()))]


def block_slices(layout, shape, sizes, device):
    """The true region that a device holds, as slices of the global value."""
    slices = []
    for axes, n, b in zip(layout.dims, shape, layout.local_shape(sizes), strict=True):
        number = 0
        for a in axes:
            number = number * sizes[a] + device[a]
        slices.append(slice(min(n, number * b), min(n, (number + 1) * b)))
    return tuple(slices)


def contributions(rng, value, layout, sizes):
    """For each position along the pending axes, a global array; reduced over all of them they give
    `value`.
    """
    positions = list(itertools.product(*(range(sizes[a]) for a in layout.pending_axes)))
    kinds = {k for _, k in layout.pending}
    parts = {p: rng.integers(-9, 9, value.shape).astype(value.dtype) for p in positions}
    if not kinds:
        return {(): value}
    owner = positions[-1]
    if kinds == {"sum"}:
        parts[owner] = value - sum((v for p, v in parts.items() if p != owner), np.zeros_like(value))
    else:
        sign = -1 if kinds == {"max"} else 1
        parts = {p: value + sign * np.abs(v) for p, v in parts.items()}
        parts[owner] = value
    return parts


def local_shards(rng, value, layout, sizes):
    """What each device holds, in mesh order, tails full of garbage."""
    parts = contributions(rng, value, layout, sizes)
    shards = []
    for device in coordinates(sizes):
        part = parts[tuple(device[a] for a in layout.pending_axes)]
        true = part[block_slices(layout, value.shape, sizes, device)]
        shard = np.full(layout.local_shape(sizes), 99, value.dtype)
        shard[tuple(map(slice, true.shape))] = true
        shards.append(shard)
    return np.stack(shards).reshape(*sizes.values(), *layout.local_shape(sizes))


REDUCE = {"sum": np.sum, "max": np.max, "min": np.min}


def assert_holds(shards, value, layout, sizes):
    """`shards`, reduced over what is pending, hold `value` in `layout`."""
    names = list(sizes)
    for axis, kind in layout.pending:
        shards = REDUCE[kind](shards, axis=names.index(axis), keepdims=True)
    for device in coordinates(sizes):
        at = tuple(0 if a in layout.pending_axes else device[a] for a in names)
        want = value[block_slices(layout, value.shape, sizes, device)]
        np.testing.assert_array_equal(shards[at][tuple(map(slice, want.shape))], want)


def run_paths(cases, sizes):
    """Runs all paths in one compiled program: cases are (path, shape, stacked shards)."""
    names = tuple(sizes)
    mesh = Mesh(np.array(jax.devices()[: shard_count(names, sizes)]).reshape(*sizes.values()), names)
    spec = PartitionSpec(*names)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def on_devices(stacked):
        outs = []
        for (path, shape, _), x in zip(cases, stacked, strict=True):
            out = run.apply(path, x.reshape(x.shape[len(names) :]), shape, sizes)
            outs.append(out.reshape((1,) * len(names) + out.shape))
        return outs

    return on_devices([stacked for _, _, stacked in cases])


SHAPES = [(8, 8), (5, 12), (3, 7), (16,), (9,), (4, 6, 2), (), (0, 4), (1, 13)]


@pytest.mark.not_quick
@pytest.mark.once
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_paths_bring_values_where_they_should_be(mesh, dtype):
    sizes, rng, values = MESHES[mesh], random.Random(0), np.random.default_rng(0)
    kinds = [] if dtype == np.bool_ else ["sum", "sum", "max", "min"]
    cases = []
    for i in range(24):
        shape = SHAPES[i % len(SHAPES)]
        src, dst = random_layout(rng, shape, sizes, kinds), random_layout(rng, shape, sizes, kinds)
        value = values.integers(-9, 9, shape).astype(dtype)
        path = paths.plan(src, dst, shape, value.dtype.itemsize, sizes)
        cases.append((src, dst, value, path, local_shards(values, value, src, sizes)))
    outs = run_paths([(path, value.shape, shards) for _, _, value, path, shards in cases], sizes)
    for (src, dst, value, path, _), out in zip(cases, outs, strict=True):
        try:
            assert_holds(np.asarray(out), value, dst, sizes)
        except AssertionError as error:
            raise AssertionError(f"{src} -> {dst}: {path}") from error


EXCHANGES = [
    # mesh, shape, shardings before and after
    ("x4y2", (8, 8, 8, 8), ["_", "x", "y", "_"], ["y", "_", "_", "x"]),
    ("x4y2", (8, 8, 8), ["y", "_", "x"], ["_", "xy", "_"]),
    ("x4y2", (8, 8, 8), ["_", "yx", "_"], ["x", "_", "y"]),
    ("x4y2", (8, 8), ["xy", "_"], ["_", "yx"]),
    ("x2y2z2", (8, 8, 8), ["xy", "z", "_"], ["x", "_", "zy"]),
    ("x2y2z2", (8, 6, 4, 8), ["z", "x", "y", "_"], ["zyx", "_", "_", "_"]),
    ("x2y3", (5, 4, 7), ["_", "x", "y"], ["yx", "_", "_"]),
    ("x4y2", (3, 5, 6), ["x", "y", "_"], ["_", "_", "yx"]),
]


@pytest.mark.not_quick
@pytest.mark.parametrize("mesh, shape, before, after", EXCHANGES)
def test_exchanges_between_several_dims(mesh, shape, before, after):
    """Axes that leave and come to several dims move in one all_to_all, which sends less than two."""
    sizes, rng = MESHES[mesh], np.random.default_rng(0)
    src, dst = layout(before, shape, sizes), layout(after, shape, sizes)
    path = paths.plan(src, dst, shape, 4, sizes)
    (step,) = path.steps
    count = shard_count(step.axes, sizes)
    want = [p if axes else n for p, n, axes in zip(dst.padded, shape, dst.dims, strict=True)]
    volume = math.prod(max(a, b) for a, b in zip(want, src.padded, strict=True)) // math.prod(sizes.values())
    assert step.kind == "all_to_all" and path.nbytes == 4 * volume * (count - 1) // count
    value = rng.integers(-9, 9, shape).astype("int32")
    shards = local_shards(rng, value, src, sizes)
    (out,) = run_paths([(path, shape, shards)], sizes)
    assert_holds(np.asarray(out), value, dst, sizes)


SWAPS = [
    # mesh, shape, shardings before and after
    ("x4y2", (8, 8), ["x", "y"], ["y", "x"]),
    ("x4y2", (7, 3, 5), ["y", "_", "x"], ["x", "_", "y"]),
    ("x2y2z2", (8, 12), ["zx", "y"], ["y", "zx"]),
    ("x2y2z2", (8, 12), ["x", "zy"], ["zy", "x"]),
    ("x2y3", (120, 71), ["x", "y"], ["y", "x"]),
    ("x2y3", (50, 3, 180), ["y", "_", "x"], ["x", "_", "y"]),
]


@pytest.mark.not_quick
@pytest.mark.parametrize("mesh, shape, before, after", SWAPS)
def test_axes_of_different_sizes_change_places(mesh, shape, before, after):
    """Each device sends its shard, in as many pieces as it goes to devices."""
    sizes, rng = MESHES[mesh], np.random.default_rng(0)
    finest = math.lcm(*sizes.values())
    padded = tuple(n if word == "_" else round_up(n, finest) for n, word in zip(shape, before, strict=True))
    src, dst = (Layout(layout(words, shape, sizes).sharding, padded) for words in (before, after))
    path = paths.plan(src, dst, shape, 4, sizes)
    (step,) = path.steps
    assert step.kind == "swap" and path.nbytes == 4 * math.prod(src.local_shape(sizes))
    value = rng.integers(-9, 9, shape).astype("int32")
    shards = local_shards(rng, value, src, sizes)
    (out,) = run_paths([(path, shape, shards)], sizes)
    assert_holds(np.asarray(out), value, dst, sizes)


@pytest.mark.parametrize("x, y", [(4, 6), (2, 3), (6, 8), (8, 6)])
def test_axes_of_which_none_divides_the_other_change_places_at_once(x, y):
    """Each device sends its shard once, where three all_to_alls sent it two and a half times."""
    shape, sizes = (1536, 1536), {"x": x, "y": y}
    src, dst = (layout(words, shape, sizes) for words in (["x", "y"], ["y", "x"]))
    path = paths.plan(src, dst, shape, 4, sizes)
    shard = 4 * math.prod(src.local_shape(sizes))
    assert [step.kind for step in path.steps] == ["swap"] and path.nbytes == shard
    assert path.price == paths.price(src, dst, shape, 4, sizes) <= 1.02 * shard / NOMINAL.link_rate * PICO


@pytest.mark.parametrize("p, q", [(1, 5), (5, 1), (2, 3), (3, 2), (3, 4), (2, 5)])
def test_in_each_round_of_a_swap_each_device_sends_and_gets_one_piece(p, q):
    sent = set()
    for along, across in steps._rounds(p, q):
        i, j = np.indices((p, q))
        row, column = i * q + along, j * p + across
        sent |= {*zip(row.flat, column.flat, strict=True)}
        ends = {*zip((row // p).flat, (column // q).flat, strict=True)}
        assert len(ends) == p * q
    assert len(sent) == (p * q) ** 2


# Against an exhaustive search: all layouts over the axes that the two use, all pairs of them that one
# collective connects


def all_layouts(shape, sizes, pending_axes, finest):
    """Every way to split `shape`, padded for every split up to `finest` blocks, with every subset of pending
    sums.
    """
    places = [*range(len(shape)), None]
    for order in itertools.permutations(sizes):
        for choice in itertools.product(
            *([*places, "pending"] if a in pending_axes else places for a in order)
        ):
            dims = tuple(
                tuple(a for a, c in zip(order, choice, strict=True) if c == d) for d in range(len(shape))
            )
            pending = tuple(sorted((a, "sum") for a, c in zip(order, choice, strict=True) if c == "pending"))
            options = [
                paddings(n, shard_count(axes, sizes), finest) for n, axes in zip(shape, dims, strict=True)
            ]
            for padded in itertools.product(*options):
                yield Layout(Sharding(dims), padded, pending)


def paddings(size, count, finest):
    sizes = {round_up(size, k) for k in range(1, finest + 1) if finest % k == 0}
    return [size] if count == 1 else sorted(p for p in sizes if p % count == 0)


class Graph:
    """The single steps between all layouts, found by looking at pairs of layouts, priced by what each device
    holds.
    """

    def __init__(self, shape, network, pending_axes, finest):
        self.shape, self.sizes, self.network = shape, network, network
        self.layouts = list(dict.fromkeys(all_layouts(shape, network, pending_axes, finest)))
        self.held = {layout: self.blocks(layout) for layout in self.layouts}
        self.edges = {
            a: [(b, c) for b in self.layouts if a != b and (c := self.cost(a, b)) is not None]
            for a in self.layouts
        }

    def blocks(self, layout):
        """For each device, the first row of its block in each dim, and its place along the pending axes."""
        local = layout.local_shape(self.sizes)
        held = []
        for device in coordinates(self.sizes):
            starts = []
            for axes, b in zip(layout.dims, local, strict=True):
                number = 0
                for a in axes:
                    number = number * self.sizes[a] + device[a]
                starts.append(number * b)
            held.append((*starts, "pending", *(device[a] for a in layout.pending_axes)))
        return held

    def cost(self, a, b):
        """(picoseconds, collectives) of the cheapest single step from a to b, None if there is none."""
        differing = [
            d for d in range(len(self.shape)) if (a.dims[d], a.padded[d]) != (b.dims[d], b.padded[d])
        ]
        lost, won = [sorted(set(p) - set(q)) for p, q in ((a.pending, b.pending), (b.pending, a.pending))]
        costs = [self.bijection(a, b)]
        if not lost and not won and len(differing) == 1:
            costs += [
                self.gather(a, b, *differing),
                self.slice(a, b, *differing),
                self.halo(a, b, *differing),
            ]
        if not lost and not won and len(differing) == 2:
            costs += [self.exchange(a, b, i, j) for i, j in itertools.permutations(differing)]
            costs.append(self.swap(a, b, *differing))
        if not lost and not won:
            costs.append(self.exchanges(a, b))
        if lost and not won and not differing:
            axes = [axis for axis, _ in lost]
            k = shard_count(axes, self.sizes)
            costs.append(self.sends("all_reduce", axes, -(-2 * self.volume(a) * (k - 1) // k)))
        if lost and not won and len(differing) == 1:
            costs.append(self.scatter(a, b, *differing, [axis for axis, _ in lost]))
        if won and not lost and not differing:
            costs.append((self.network.compute(0, 2 * self.volume(a)), 0))
        return min((c for c in costs if c is not None), default=None)

    def sends(self, kind, axes, nbytes, minor=None, far=False):
        return self.network.collective(kind, tuple(axes), nbytes, minor, far), 1

    def permutes(self, axes, nbytes):
        """From any device to any other: in a ring of four there are two that are no neighbours."""
        return self.sends("ppermute", axes, nbytes, far=any(self.sizes[a] > 3 for a in axes))

    def volume(self, layout):
        return math.prod(layout.local_shape(self.sizes))

    def bijection(self, a, b):
        if a.local_shape(self.sizes) == b.local_shape(self.sizes) and sorted(self.held[a]) == sorted(
            self.held[b]
        ):
            moved = [axis for axis in self.sizes if self.place(a, axis) != self.place(b, axis)]
            return (0, 0) if self.held[a] == self.held[b] else self.permutes(moved, self.volume(a))

    def place(self, layout, axis):
        """The dim that an axis splits, the pending axes counting as one more, and its stride there."""
        for dim, axes in enumerate((*layout.dims, layout.pending_axes)):
            if axis in axes:
                return dim, shard_count(axes[axes.index(axis) + 1 :], self.sizes)

    def gather(self, a, b, dim):
        keep = len(b.dims[dim])
        if (
            keep < len(a.dims[dim])
            and a.dims[dim][:keep] == b.dims[dim]
            and (not keep or a.padded[dim] == b.padded[dim])
        ):
            k = shard_count(a.dims[dim][keep:], self.sizes)
            return self.sends("all_gather", a.dims[dim][keep:], self.volume(a) * (k - 1), self.width(a, dim))

    def slice(self, a, b, dim):
        """What each device needs, it has: free. (The padded size of a split dim stays; changing it is a
        halo's business.)
        """
        have = len(a.dims[dim])
        if (
            a.dims[dim] == b.dims[dim]
            or b.dims[dim][:have] != a.dims[dim]
            or (have and a.padded[dim] != b.padded[dim])
        ):
            return None
        old, new, size = a.local_shape(self.sizes)[dim], b.local_shape(self.sizes)[dim], self.shape[dim]
        for p, q in zip(self.held[a], self.held[b], strict=True):
            if q[dim] < size and not p[dim] <= q[dim] <= min(q[dim] + new, size) <= p[dim] + old:
                return None
        return 0, 0

    def halo(self, a, b, dim):
        if a.dims[dim] != b.dims[dim]:
            return None
        old, new = a.local_shape(self.sizes)[dim], b.local_shape(self.sizes)[dim]
        count = shard_count(a.dims[dim], self.sizes)
        exchange = exchange_of(
            steps.next_blocks(dim, a.dims[dim], old, new, count, self.shape[dim])
        )  # see test_halo.py
        row, far = self.volume(a) // old, exchange.reaches_far(tuple(self.sizes[x] for x in a.dims[dim]))
        prices = [
            self.sends("ppermute", a.dims[dim], row * rows, far=f)[0]
            for rows, f in zip(exchange.sent, far, strict=True)
        ]
        return sum(prices), len(prices)

    def arrives(self, a, b, dim):
        """The axes that b adds as minor-most to `dim`, and a's elements with `dim` padded for them; None if
        they do not fit.
        """
        have = len(a.dims[dim])
        axes = b.dims[dim][have:]
        if b.dims[dim][:have] == a.dims[dim] and axes and (not have or a.padded[dim] == b.padded[dim]):
            return axes, self.volume(a) // a.local_shape(self.sizes)[dim] * (
                b.padded[dim] // shard_count(a.dims[dim], self.sizes)
            )

    def exchange(self, a, b, dim, to):
        axes, volume = self.arrives(a, b, to) or ((), 0)
        stays = a.padded[dim] == b.padded[dim] or not b.dims[dim]
        if axes and a.dims[dim] == b.dims[dim] + axes and stays:
            k = shard_count(axes, self.sizes)
            return self.sends("all_to_all", axes, volume * (k - 1) // k)

    def exchanges(self, a, b):
        """Axes that leave any dims, and come to others."""
        coming, leaving, volume = [], [], self.volume(a)
        for d, (have, wanted) in enumerate(zip(a.dims, b.dims, strict=True)):
            k = min(len(have), len(wanted))
            if have[:k] != wanted[:k] or (k and a.padded[d] != b.padded[d]):
                return None
            coming, leaving = coming + [*wanted[k:]], leaving + [*have[k:]]
            volume = (
                volume // a.local_shape(self.sizes)[d] * (b.padded[d] // shard_count(have[:k], self.sizes))
                if not have
                else volume
            )
        if coming and sorted(coming) == sorted(leaving):
            k = shard_count(coming, self.sizes)
            return self.sends("all_to_all", coming, volume * (k - 1) // k)

    def swap(self, a, b, i, j):
        """Axes of two dims change places, as many pieces as the blocks of one become."""
        shared = [len(os.path.commonprefix([a.dims[d], b.dims[d]])) for d in (i, j)]
        here, there = (a.dims[d][n:] for d, n in zip((i, j), shared, strict=True))
        back = [b.dims[d][n:] for d, n in zip((j, i), shared[::-1], strict=True)]
        if a.padded != b.padded or not here or not there or back != [here, there]:
            return None
        blocks = [shard_count(axes, self.sizes) for axes in (here, there)]
        each, of_each = (math.lcm(*blocks) // n for n in blocks)
        whole = all(
            a.local_shape(self.sizes)[d] % cut == 0 and b.local_shape(self.sizes)[d] % other == 0
            for d, cut, other in ((i, each, of_each), (j, of_each, each))
        )
        if whole and 1 < (k := each * of_each) <= steps.PIECES:
            moved = [a for a in self.sizes if a in (*here, *there)]
            return k * self.permutes(moved, self.volume(a) // k)[0], k

    def scatter(self, a, b, to, lost):
        axes, volume = self.arrives(a, b, to) or ((), 0)
        if sorted(axes) == sorted(lost):
            k = shard_count(axes, self.sizes)
            return self.sends("reduce_scatter", axes, volume * (k - 1) // k, self.width(b, to))

    def width(self, layout, dim):
        return layout.local_shape(self.sizes)[dim] if dim == minor_most(self.shape) else None

    def distances(self, src):
        """Bellman-Ford: relax until nothing changes."""
        best, changed = {src: (0, 0)}, [src]
        while changed:
            again = {}
            for a in changed:
                for b, (price, count) in self.edges[a]:
                    cost = (best[a][0] + price, best[a][1] + count)
                    if b not in best or cost < best[b]:
                        best[b], again[b] = cost, None
            changed = list(again)
        return best


@cache
def graph(shape, network, pending_axes, finest):
    return Graph(shape, network, pending_axes, finest)


EXHAUSTIVE = [
    ((8, 8), {"x": 4, "y": 2}, "xy"),
    ((5, 8), {"x": 2, "y": 2}, "xy"),
    ((5, 3), {"x": 2, "y": 3}, "x"),
    ((7, 8), {"x": 4, "y": 2}, "y"),
    ((3, 8), {"x": 8}, "x"),
    ((5, 4, 3), {"x": 2, "y": 3}, "x"),
    ((8, 3, 1), {"x": 4, "y": 2}, "x"),
    ((5, 7), {"x": 2, "y": 2, "z": 2}, "x"),
    ((9,), {"x": 2, "y": 2, "z": 2}, "x"),
    ((8, 8), {"x": 2, "y": 2, "z": 2}, "x"),
    ((24, 12), {"x": 2, "y": 3, "z": 2}, ""),
    ((3, 1), {"x": 4, "y": 1}, "x"),
]


TORUS = replace(chips.V5E, lanes=2)
"""A chip whose hops count, and to whose compiler one or two elements of the minor-most dim are too few for a
reduce_scatter, and one is for an all_gather.
"""


@pytest.mark.once
@pytest.mark.parametrize(
    "chip", [chips.NOMINAL, TORUS, replace(chips.H200, host=2)], ids=lambda chip: chip.name
)
@pytest.mark.parametrize("shape, sizes, pending_axes", EXHAUSTIVE)
def test_nothing_is_cheaper(shape, sizes, pending_axes, chip):
    rng, finest = random.Random(0), math.prod(sizes.values())
    everything = list(dict.fromkeys(all_layouts(shape, sizes, pending_axes, finest)))
    for src in rng.sample(everything, min(6, len(everything))):
        for dst in rng.sample(everything, min(12, len(everything))):
            used = {*src.sharding.axes, *dst.sharding.axes, *src.pending_axes, *dst.pending_axes}
            network = Network(sizes, chip)
            places = network.places.along([d for d, a in enumerate(sizes) if a in used])
            only = Network({a: n for a, n in sizes.items() if a in used}, chip, places)
            best = graph(shape, only, pending_axes, finest).distances(src)[dst]
            path = paths.plan(src, dst, shape, 1, network)
            assert path.price == best[0], f"{src} -> {dst}: {path}, {path.price} ps; possible: {best}"


CHIPS = [chips.NOMINAL, replace(chips.V5E, lanes=4), replace(chips.H200, host=2)]


@pytest.mark.once
@pytest.mark.once
@pytest.mark.parametrize(
    "mesh", [{"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 4, "z": 2}, {"x": 3, "y": 2}], ids=str
)
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_price_is_that_of_the_path(mesh, chip):
    """Though what costs the same, in other dims or over axes that are joined alike, is priced once."""
    network, rng = Network(mesh, chip), random.Random(1)
    for i in range(150):
        shape = [(8, 6, 1), (16, 8), (1, 4, 12), (5, 8), (7,), (4, 4, 4), (8, 1)][i % 7]
        src, dst = (random_layout(rng, shape, network, ["sum", "sum", "max"]) for _ in range(2))
        path = paths.plan(src, dst, shape, 2, network)
        assert paths.price(src, dst, shape, 2, network) == path.price, f"{src} -> {dst}: {path}"


@pytest.mark.once
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_lower_bound_is_one(chip):
    """And the price itself where the axes are few."""
    network, rng, bounded = Network({"w": 2, "x": 2, "y": 3, "z": 2}, chip), random.Random(2), 0
    for i in range(40):
        shape = [(8, 6), (16, 24), (48,), (5, 8), (4, 6, 8)][i % 5]
        src, dst = (random_layout(rng, shape, network, ["sum", "sum", "max"]) for _ in range(2))
        price, least = (f(src, dst, shape, 2, network) for f in (paths.price, paths.least))
        used = {*src.sharding.axes, *dst.sharding.axes, *src.pending_axes, *dst.pending_axes}
        assert (least == price) if len(used) <= 3 else (0 <= least <= price), f"{src} -> {dst}"
        bounded += least < price
    assert bounded


# The known cases


def layout(sharding, shape, sizes, pending=()):
    """`sharding` as words, one per dim: "xy" is split over x and y, "_" over nothing."""
    dims = tuple(tuple(word.strip("_")) for word in sharding)
    padded = tuple(round_up(n, shard_count(axes, sizes)) for n, axes in zip(shape, dims, strict=True))
    return Layout(Sharding(dims), padded, tuple(pending))


X_SUM, Y_SUM = ("x", "sum"), ("y", "sum")
X4Y2 = {"x": 4, "y": 2}
X2Y2 = {"x": 2, "y": 2}
KNOWN = [
    # shardings, pending before and after, mesh, steps
    (["x", "_"], [], ["x", "_"], [], X4Y2, "nothing"),
    (["x", "_"], [], ["_", "_"], [], X4Y2, "all_gather x"),
    (["xy", "_"], [], ["_", "_"], [], X4Y2, "all_gather x,y"),
    (["xy", "_"], [], ["x", "_"], [], X4Y2, "all_gather y"),
    (["_", "_"], [], ["xy", "_"], [], X4Y2, "slice x,y"),
    (["x", "_"], [], ["xy", "_"], [], X4Y2, "slice y"),
    (["x", "_"], [], ["_", "x"], [], X4Y2, "all_to_all x"),
    (["xy", "_"], [], ["_", "xy"], [], X4Y2, "all_to_all x,y"),
    (["xy", "_"], [], ["x", "y"], [], X4Y2, "all_to_all y"),
    (["x", "_"], [], ["y", "_"], [], X2Y2, "ppermute x,y"),
    (["x", "y"], [], ["y", "x"], [], X2Y2, "ppermute x,y"),
    (["x", "y"], [], ["y", "x"], [], X4Y2, "swap x,y"),
    (["x", "_", "y"], [], ["y", "_", "x"], [], {"x": 2, "y": 16}, "swap x,y"),
    (["xy", "_"], [], ["yx", "_"], [], X4Y2, "ppermute x,y"),
    (["y", "_", "x"], [], ["_", "xy", "_"], [], X4Y2, "all_to_all x,y"),
    (["_", "x", "y"], [], ["y", "_", "x"], [], X4Y2, "all_to_all y; all_to_all x"),
    (["_", "xy", "_"], [], ["y", "_", "x"], [], X4Y2, "all_to_all x,y"),
    (["x", "_", "_"], [], ["_", "_", "x"], [], X4Y2, "all_to_all x"),
    (["_", "_"], [X_SUM], ["_", "_"], [], X4Y2, "all_reduce x"),
    (["_", "_"], [X_SUM, Y_SUM], ["_", "_"], [], X4Y2, "all_reduce x,y"),
    (["_", "_"], [Y_SUM, X_SUM], ["_", "_"], [X_SUM, Y_SUM], X4Y2, "nothing"),
    (["_", "_"], [X_SUM], ["x", "_"], [], X4Y2, "reduce_scatter x"),
    (["_", "_"], [X_SUM, Y_SUM], ["yx", "_"], [], X4Y2, "reduce_scatter y,x"),
    (["y", "_"], [X_SUM], ["yx", "_"], [], X4Y2, "reduce_scatter x"),
    (["y", "_"], [X_SUM], ["_", "_"], [], X4Y2, "reduce_scatter x; all_gather y,x"),
    (["_", "_"], [("x", "max")], ["x", "_"], [], X4Y2, "all_reduce x; slice x"),
    (["_", "_"], [], ["_", "_"], [X_SUM], X4Y2, "owe x"),
    (["_", "_"], [X_SUM], ["_", "_"], [X_SUM, Y_SUM], X4Y2, "owe y"),
    (["x", "_"], [], ["_", "_"], [], {"x": 1}, "crop"),
]


@pytest.mark.parametrize("before, owed, after, owing, sizes, steps", KNOWN)
def test_known(before, owed, after, owing, sizes, steps):
    shape = (16, 32, 64)[: len(before)]
    path = paths.plan(layout(before, shape, sizes, owed), layout(after, shape, sizes, owing), shape, 4, sizes)
    assert ("; ".join(f"{s.kind} {','.join(s.axes)}".strip() for s in path.steps) or "nothing") == steps


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fnuz", "int16", "uint8", "bool"]
)
def test_extrema_are_those_of_one_device(dtype):
    """Collectives of XLA's CPU lose NaN; and some floats of eight bits have all integers but one for
    numbers.
    """
    x = np.random.RandomState(0).randn(4, 9).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        greatest = float(jnp.finfo(dtype).max)
        x[0, :7] = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, greatest, -greatest]).astype(dtype)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for kind, reduce in (("max", jnp.max), ("min", jnp.min)):
        reduced = jax.shard_map(
            lambda x, kind=kind: run.REDUCE[kind](x[0], "x"),
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
        )
        got, wanted = jax.jit(reduced)(x), jax.jit(reduce, static_argnums=1)(x, 0)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(wanted, "float32"))


@pytest.mark.not_quick
def test_one_device_gets_all_there_is():
    """XLA's CPU compiler refuses an all_to_all of what was transposed and is padded by whole blocks."""
    mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    x = np.arange(126, dtype="float32").reshape(7, 3, 3, 2)
    before, after = PartitionSpec(("y", "x")), PartitionSpec(("x", "y"))
    step = sx.shard_jit(lambda x: sx.annotate(sx.annotate(x, before).swapaxes(0, 1), after) * 2, mesh=mesh)
    np.testing.assert_array_equal(step(x), x.swapaxes(0, 1) * 2)


@pytest.mark.not_quick
def test_some_devices_get_padding():
    """So it does where some blocks are whole, some cut and some padding, as 5 rows on 4 devices."""

    def scanned(x):
        step = lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])  # noqa: E731
        return jax.lax.associative_scan(step, (jnp.tanh(x) / 2, jnp.sin(x)), axis=0)[1]

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    columns = jax.vmap(
        sx.shard_jit(
            scanned, mesh=mesh, in_shardings=PartitionSpec(None, "x"), out_shardings=PartitionSpec("x")
        ),
        -1,
        -1,
    )
    x = np.random.default_rng(0).normal(size=(5, 16, 2)).astype("float32")
    np.testing.assert_allclose(columns(x), jax.vmap(scanned, -1, -1)(x), rtol=1e-5, atol=1e-5)


def test_what_a_reshard_costs_does_not_depend_on_the_order_of_dims():
    network, shape, rng = Network({"x": 4, "y": 2}), (8, 12, 9), np.random.default_rng(0)
    for _ in range(40):
        ends = []
        for _ in range(2):
            dims = [()] * 3
            for axis, d in zip(("x", "y"), rng.integers(4, size=2).tolist(), strict=True):
                dims[d : d + 1] = [(*dims[d], axis)] if d < 3 else []
            ends.append(Padding(network).layout(Sharding(tuple(dims)), shape))
        prices = set()
        for order in itertools.permutations(range(3)):
            first, last = (
                Layout(Sharding(tuple(end.dims[d] for d in order)), tuple(end.padded[d] for d in order))
                for end in ends
            )
            prices.add(paths.price(first, last, tuple(shape[d] for d in order), 4, network))
        assert len(prices) == 1


@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2, "z": 2}, {"w": 2, "x": 3, "y": 3, "z": 2}], ids=str)
def test_what_a_reshard_costs_does_not_depend_on_which_of_alike_axes_are_where(sizes):
    """Nor are further paths looked for."""
    network, shape, rng = Network(sizes), (12, 24), random.Random(0)
    orders = [
        order for order in itertools.permutations(sizes) if [sizes[a] for a in order] == [*sizes.values()]
    ]
    assert len(orders) > 2
    for _ in range(20):
        ends = [random_layout(rng, shape, network, ["sum"]) for _ in range(2)]
        prices, searched = set(), set()
        for order in orders:
            names = dict(zip(sizes, order, strict=True))
            first, last = (
                Layout(
                    Sharding(tuple(tuple(names[a] for a in axes) for axes in end.dims)),
                    end.padded,
                    tuple(sorted((names[a], kind) for a, kind in end.pending)),
                )
                for end in ends
            )
            prices.add(paths.price(first, last, shape, 4, network))
            prices.add(paths.plan(first, last, shape, 4, network).price)
            searched.add(sum(f.cache_info().misses for f in (reach._steps, reach._from, reach._from_all)))
        assert len(prices) == 1
        assert len(searched) <= 2, "paths of axes that cost alike are looked for again"


def test_prices_stay_what_they_are_when_spaces_are_forgotten():
    """Numbers of layouts are those of the space that a price is found in, also where that is another now."""
    network, shape = Network({"x": 4, "y": 2}), (16, 24)
    specs = [
        PartitionSpec("x"),
        PartitionSpec(None, "x"),
        PartitionSpec("y"),
        PartitionSpec(None, ("x", "y")),
        PartitionSpec("y", "x"),
        PartitionSpec(),
        PartitionSpec("x", "y"),
    ]
    ends = [Padding(network).layout(from_spec(spec, 2), shape) for spec in specs]
    pairs = list(itertools.permutations(ends, 2))
    wanted = [paths.price(*pair, shape, 2, network) for pair in pairs]
    for forget in (
        paths._space,
        paths._scale,
        paths._price,
        reach._from,
        reach._from_all,
        reach._steps,
        reach._grid,
        reach.skeleton,
    ):
        forget.cache_clear()
    again = [paths.price(*pair, shape, 8, network) for pair in reversed(pairs)]
    for forget in (paths._frame, paths._frame_of, paths._space, paths._scale, paths._price):
        forget.cache_clear()
    assert again == [paths.price(*pair, shape, 8, network) for pair in reversed(pairs)]
    assert wanted == [paths.price(*pair, shape, 2, network) for pair in pairs]


SPACES = [  # shape, bytes of an element, dims that may be split, one of them padded otherwise, a chip with lanes or not
    ((64, 1024, 4096), 2, (0, 1, 2), {}, "v5p"),
    ((12, 3, 1024), 4, (0, 2), {}, "nominal"),
    ((8, 48), 1, (0, 1), {}, "v5p"),
    ((4, 8, 24), 2, (0, 1, 2), {}, "v5p"),
    ((9, 3, 48), 2, (0, 2), {0: (12, 16)}, "v5p"),
    ((48, 9), 2, (0, 1), {1: (9, 12, 32)}, "v5p"),
]


@pytest.mark.parametrize("shape, itemsize, dims, uneven, chip", SPACES)
def test_values_that_share_a_space_pay_what_they_would_alone(shape, itemsize, dims, uneven, chip):
    network = Network({"x": 4, "y": 8}, chip=chips.CHIPS.get(chip, chips.NOMINAL))
    axes, owing, fixed = ("x", "y"), (("x", "sum"), ("y", "sum")), (0,) * len(shape)
    paddings = tuple(uneven.get(d, (n,)) if d in dims else () for d, n in enumerate(shape))
    minor = minor_most(shape) if network.chip.lanes else None
    order = tuple(range(len(shape)))
    frame = paths._Frame(shape, axes, dims, paddings, minor, network, True, order, 1)
    shared = frame.value(False, itemsize, fixed, owing)
    counts = steps.Counts(network)
    alone = steps.Space(shape, itemsize, network, axes, dims, paddings, fixed, owing, minor, counts)
    space, prices = shared.scale.space, steps.Scale(alone, 1, 1, (1, 1))
    assert space.shape != shape
    for pending in ((), owing[:1], owing):
        start = steps.State(((),) * len(shape), shape, pending)
        seen, queue = {start}, [start]
        while queue:
            node = queue.pop()
            found, wanted = space.edges(shared.number(node)), alone.edges(alone.number(node))
            for (tariff, count, after, edge), (own, *_, step) in zip(found, wanted, strict=True):
                assert (edge.kind, edge.axes, edge.dim, edge.to, count) == (
                    step.kind,
                    step.axes,
                    step.dim,
                    step.to,
                    step.count,
                )
                assert shared.state(after) == step.after
                assert shared.scale.bytes(edge.nbytes) == step.nbytes
                assert shared.scale[tariff] == prices[own]
            queue += {edge.after for *_, edge in wanted} - seen
            seen |= {edge.after for *_, edge in wanted}
        assert len(seen) > 8

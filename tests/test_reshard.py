"""Paths between layouts: cheapest against an exhaustive search, right when executed, and the known cases by name."""

import doctest
import itertools
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardax import reshard
from shardax.sharding import Layout, Padding, Sharding, round_up, shard_count

MESHES = {
    "x8": {"x": 8},
    "x4y2": {"x": 4, "y": 2},
    "x2y3": {"x": 2, "y": 3},
    "x2y2z2": {"x": 2, "y": 2, "z": 2},
    "x1y4z2": {"x": 1, "y": 4, "z": 2},
}


def test_doctests():
    assert doctest.testmod(reshard).failed == 0


# Executed


def random_layout(rng, shape, sizes, kinds):
    """Each axis splits a dim, or is pending, or is unused; a split dim is padded as little as possible, or a little more."""
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
    """For each position along the pending axes, a global array; reduced over all of them they give `value`."""
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
    def run(stacked):
        outs = []
        for (path, shape, _), x in zip(cases, stacked, strict=True):
            out = reshard.apply(path, x.reshape(x.shape[len(names) :]), shape, sizes)
            outs.append(out.reshape((1,) * len(names) + out.shape))
        return outs

    return run([stacked for _, _, stacked in cases])


SHAPES = [(8, 8), (5, 12), (3, 7), (16,), (9,), (4, 6, 2), (), (0, 4), (1, 13)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_executes(mesh, dtype):
    sizes, rng, values = MESHES[mesh], random.Random(0), np.random.default_rng(0)
    kinds = [] if dtype == np.bool_ else ["sum", "sum", "max", "min"]
    cases = []
    for i in range(24):
        shape = SHAPES[i % len(SHAPES)]
        src, dst = random_layout(rng, shape, sizes, kinds), random_layout(rng, shape, sizes, kinds)
        value = values.integers(-9, 9, shape).astype(dtype)
        path = reshard.plan(src, dst, shape, value.dtype.itemsize, sizes)
        cases.append((src, dst, value, path, local_shards(values, value, src, sizes)))
    outs = run_paths([(path, value.shape, shards) for _, _, value, path, shards in cases], sizes)
    for (src, dst, value, path, _), out in zip(cases, outs, strict=True):
        try:
            assert_holds(np.asarray(out), value, dst, sizes)
        except AssertionError as error:
            raise AssertionError(f"{src} -> {dst}: {path}") from error

"""What holds of any program, of random ones: two side by side cost no more than each alone, what stands in
branches, or in a loop, hardly more than what stands outside, and no list of ways is too short.

python -m tests.test_compositions 500            as many programs, of seeds 0, 1, ...; prints those that cost more
python -m tests.test_compositions 1 --seed 17    that of one seed
python -m tests.test_compositions 120 --cube     on 2 x 2 x 2 devices
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.partition import alternatives

N = 1024
MESHES = ({"x": 8}, {"x": 2, "y": 4})
CUBE = ({"x": 2, "y": 2, "z": 2},)
ALL = 10_000  # ways of an operation: no list is cut
LITTLE = 1.01  # times as long; but to write the results of a branch or a loop takes its time, if nothing more is sent
FEW = 0.04  # the share of programs that cost more than that there
MOST = 2.0  # how many times as much


def residual(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def normed(x, w):
    return jnp.tanh((x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w)


def attention(q, k, v):
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k)), v)


def convolutions(x, w, u):
    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return convolved(jnp.tanh(convolved(x, w)), u)


def gradients(x, up, down):
    return jax.grad(lambda up, down: jnp.sum((jnp.tanh(x @ up) @ down) ** 2), (0, 1))(up, down)


def statistics(x, w):
    h = x @ w
    return (h - h.mean(0, keepdims=True)) / h.std(0, keepdims=True)


def heads(x, w, out):
    return jnp.einsum("bthd,hde->bte", jnp.tanh(jnp.einsum("bte,ehd->bthd", x, w)), out)


FUNCTIONS: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (residual, [(N, N), (N, 2 * N), (2 * N, N)]),
    (normed, [(N, N), (N, N)]),
    (attention, [(8, N, 64)] * 3),
    (convolutions, [(8, 32, 32, 64), (3, 3, 64, 128), (3, 3, 128, 64)]),
    (gradients, [(N, N), (N, 2 * N), (2 * N, N)]),
    (statistics, [(4 * N, N), (N, N)]),
    (heads, [(8, 128, 512), (512, 8, 64), (8, 64, 512)]),
    (lambda x, w: jnp.cumsum(jnp.tanh(x @ w), 0) * x, [(N, N), (N, N)]),
    (lambda x, w: jnp.tanh(x).T @ w + x, [(N, N), (N, N)]),
    (lambda x, w: jnp.sort(x, 0) @ w, [(N, N), (N, N)]),
    (lambda x, b, w: (x + b[None]) @ w, [(N, N), (N,), (N, N)]),
    (lambda e, w: jnp.take(e, jnp.arange(512) * 3 % N, 0) @ w, [(N, N), (N, N)]),
    (lambda x: (x @ x.T) @ x, [(512, 2 * N)]),
    (lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], [(N, N), (4, N, N)]),
    (lambda x, w: jnp.fft.fft(jnp.tanh(x @ w), axis=0).real, [(N, N), (N, N)]),
]


class Program(NamedTuple):
    """A function of some arrays, and the specs of these and of its results."""

    f: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    ins: tuple[P, ...]
    outs: Any


class Cost(NamedTuple):
    nbytes: int
    price: float


def specs(rank: int, axes: Sequence[str]) -> list[P]:
    """All that name each axis once at most, on a dim of so many, major or minor."""
    found = []
    for dims in itertools.product((None, *range(rank)), repeat=len(axes)):
        groups = [[a for a, d in zip(axes, dims, strict=True) if d == dim] for dim in range(rank)]
        found += [P(*[tuple(g) or None for g in order]) for order in itertools.product(*map(orders, groups))]
    return found


def orders(axes: Sequence[str]) -> list[tuple[str, ...]]:
    return list(itertools.permutations(axes))


def program(rng: random.Random, axes: Sequence[str]) -> Program:
    f, shapes = rng.choice(FUNCTIONS)
    args = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    some = lambda x: rng.choice(specs(len(x.shape), axes))  # noqa: E731
    return Program(f, args, tuple(map(some, args)), jax.tree.map(some, jax.eval_shape(f, *args)))


def cost(f, mesh: AbstractMesh, ins, outs, *args) -> Cost:
    plan = sx.shard_jit(f, mesh=mesh, in_shardings=ins, out_shardings=outs).plan(*args)
    return Cost(plan.comm_bytes, plan.decisions.price)


def with_all_ways(*args) -> Cost:
    with mock.patch.multiple(alternatives, MOST=ALL, FEWEST=ALL):
        return cost(*args)


def costs(seed: int, meshes: Sequence[dict[str, int]] = MESHES) -> Iterator[tuple[str, Cost, Cost]]:
    """What is costly, what it costs, and what it may."""
    rng = random.Random(seed)
    sizes = rng.choice(meshes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    one, other = program(rng, list(sizes)), program(rng, list(sizes))
    each = [cost(p.f, mesh, p.ins, p.outs, *p.args) for p in (one, other)]
    f, args, ins, outs = one

    def beside(xs, ys):
        return one.f(*xs), other.f(*ys)

    def branches(p, *args):
        return lax.cond(p, lambda *args: f(*args), lambda *args: f(*args), *args)

    def loop(*args):
        _, results = lax.scan(lambda carry, _: (carry, f(*args)), 0, length=1)
        return jax.tree.map(lambda x: x[0], results)

    both = cost(beside, mesh, (ins, other.ins), (outs, other.outs), args, other.args)
    yield "side by side", both, Cost(*map(sum, zip(*each, strict=True)))
    p = jax.ShapeDtypeStruct((), bool)
    yield "branches", cost(branches, mesh, (P(), *ins), outs, p, *args), each[0]
    yield "loop", cost(loop, mesh, ins, outs, *args), each[0]
    yield "lists", each[0], with_all_ways(f, mesh, ins, outs, *args)


def more(seeds: Sequence[int], meshes: Sequence[dict[str, int]] = MESHES) -> dict[str, list[float]]:
    """How many times as much those cost that cost more than they may."""
    found: dict[str, list[float]] = {"side by side": [], "branches": [], "loop": [], "lists": []}
    for seed in seeds:
        for what, its, may in costs(seed, meshes):
            ratio = its.price / max(may.price, 1.0)
            sends_more = its.nbytes > LITTLE * may.nbytes + 16 or what == "lists"
            if ratio > 1 if what == "side by side" else ratio > LITTLE and sends_more:
                found[what].append(ratio)
                print(
                    f"seed {seed}: {what} takes {ratio:.3f} times as long, sends {its.nbytes} for {may.nbytes} B"
                )
    return found


def check(found: dict[str, list[float]], count: int) -> None:
    assert not found["side by side"] and not found["lists"]
    for what in ("branches", "loop"):
        assert len(found[what]) <= FEW * count and max(found[what], default=1.0) < MOST


@pytest.mark.once
def test_what_stands_elsewhere_costs_hardly_more():
    check(more(range(80)), 80)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_what_stands_elsewhere_costs_hardly_more_of_many(first):
    check(more(range(first, first + 250)), 250)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--cube", action="store_true", help="on 2 x 2 x 2 devices, else on 8 or 2 x 4")
    args = parser.parse_args(argv)
    found = more(range(args.seed, args.seed + args.count), CUBE if args.cube else MESHES)
    print({what: len(ratios) for what, ratios in found.items()}, "of", args.count)


if __name__ == "__main__":
    main()

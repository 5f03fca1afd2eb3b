"""Random loops and branches under random meshes and shardings, against the same function under plain
`jax.jit`.

python -m tests.test_random_loops 500            as many programs, of seeds 0, 1, ...
python -m tests.test_random_loops 1 --seed 17    that of one seed
"""

import argparse
import functools
import math
import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.test_random_programs import poisoned_padding

pytestmark = pytest.mark.promotes_ranks

MESHES = [(4, 2), (2, 4), (8,), (3,), (5,), (2, 2, 2), (3, 2)]
ROWS, COLUMNS = (5, 6, 8), (4, 7, 8)  # a value inside of a loop is ROWS x COLUMNS, one of each
CARRIES = ("same", "steps", "sum", "max", "last", "recurrence", "recurrence", "key", "bool")


@dataclass(frozen=True)
class Loops:
    """A random program: what each of its choices is, only the seed says."""

    seed: int
    mesh: tuple[int, ...]
    specs: tuple[P, ...]
    trips: int
    shape: tuple[int, int]
    grad: bool

    def arguments(self):
        rng = np.random.default_rng(self.seed)
        rows, columns = self.shape
        shapes = [self.shape, (self.trips, rows, columns), (columns, columns), (self.trips, columns)]
        return [jnp.asarray(rng.choice([-1.5, -1, -0.5, 0.5, 1, 1.5], shape), "float32") for shape in shapes]


def random_loops(seed: int) -> Loops:
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    axes = "xyz"[: len(mesh)]
    specs = tuple(spec(rng, axes, rank) for rank in (2, 3, 2, 2))
    trips = rng.choice([0, 1, 2, 3, 5, 8, 8, 9, 12])
    return Loops(seed, mesh, specs, trips, (rng.choice(ROWS), rng.choice(COLUMNS)), rng.random() < 0.4)


def spec(rng: random.Random, axes: str, rank: int) -> P:
    """Half of the time the leading dim, that of the trips, is split; the axes that are left split other dims,
    or none.
    """
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in rng.sample(axes, len(axes)):
        d = rng.choice([0, 0, *range(rank), rank])
        if d < rank:
            dims[d].append(axis)
    return P(*(tuple(d) or None for d in dims))


def program(loops: Loops, constrain):
    """The function, in which `constrain(x, spec)` annotates."""
    rng = random.Random(loops.seed + 1)
    batches = rng.choice([None, 2, 3])
    mapped = rng.random() < 0.2
    carries = [rng.choice(CARRIES) for _ in range(0 if mapped else rng.randint(0, 3))]
    steps = Steps(rng, ["row", "all", "carry"] if mapped else ["row", "all", "carry", "none"])
    body = functools.partial(trip, steps, carries, remat=rng.random() < 0.2)
    how = {"reverse": rng.random() < 0.3, "unroll": rng.choice([1, 1, 2, 3])}
    pads = [rng.random() < 0.5 for _ in range(4)]

    def f(*args):
        start, xs, w, rows = (
            constrain(x, s) if pad else x for x, s, pad in zip(args, loops.specs, pads, strict=True)
        )
        if mapped:
            return lax.map(lambda x: body(w, [], x)[1], (xs, rows), batch_size=batches)
        init = [first(kind, start) for kind in carries]
        return lax.scan(lambda carry, x: body(w, carry, x), init, (xs, rows), **how)

    return f if not loops.grad else gradient(f)


def gradient(f):
    def scalar(*args):
        return sum(
            (jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(*args)) if x.dtype == jnp.float32), jnp.float32(0)
        )

    return jax.value_and_grad(scalar, (0, 1, 2, 3))


def first(kind: str, start):
    if kind == "key":
        return jax.random.key(3)
    if kind == "bool":
        return start > 0
    return jnp.int32(4) if kind == "steps" else start


class Steps:
    """The steps of a body, chosen once: it is traced several times."""

    def __init__(self, rng: random.Random, given: list[str]):
        self.names = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 3))]
        self.given = rng.choice(given)

    def __call__(self, x, w, row):
        for name in self.names:
            x = STEPS[name](x, w, row)
        return x


def trip(steps: Steps, carries, w, carry, x, remat=False):
    def body(w, carry, x):
        x, row = x
        x = x + sum(read(kind, c) for kind, c in zip(carries, carry, strict=True))
        made = steps(x, w, row)
        new = [go_on(kind, c, made) for kind, c in zip(carries, carry, strict=True)]
        given = {"row": made.sum(0), "all": (made, made * row), "none": None, "carry": (made, new)}[
            steps.given
        ]
        return new, given

    return (jax.checkpoint(body) if remat else body)(w, carry, x)


def read(kind: str, c):
    """What a body adds to its values of a carry; nothing of those that are only reduced."""
    if kind in ("same", "recurrence"):
        return 0.25 * c
    if kind == "bool":
        return jnp.where(c, 0.5, -0.5)
    if kind == "steps":
        return lax.convert_element_type(c, "float32") * 0.25
    return jax.random.normal(c, (1, 1)) if kind == "key" else jnp.zeros(())


def go_on(kind: str, c, made):
    return {
        "same": lambda: c,
        "steps": lambda: c + 3,
        "sum": lambda: c + made,
        "max": lambda: jnp.maximum(c, made),
        "last": lambda: made * 2,
        "recurrence": lambda: jnp.tanh(made) + c[::-1] * 0.5,
        "key": lambda: jax.random.fold_in(c, 1),
        "bool": lambda: c ^ (made > 0.1),
    }[kind]()


def _branches(x, w, row):
    return lax.switch(lax.convert_element_type(row[0] > 0, "int32"), [jnp.sin, lambda x: jnp.tanh(x @ w)], x)


def _inner(x, w, row):
    return x + 0.1 * lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), row, x)[1]


def _while(x, w, row):
    """Not differentiable backward, hence cut off from the gradient."""
    grown = lax.while_loop(lambda c: (c**2).sum() < 30, lambda c: c * 1.5 + 0.25, lax.stop_gradient(x))
    return x + jnp.sin(grown)


def _associative(x, w, row):
    linear = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    return lax.associative_scan(linear, (jnp.tanh(x) * 0.5, x * row), axis=0, reverse=w.shape[0] == 7)[1]


STEPS = {
    "associative": _associative,
    "branches": _branches,
    "cumsum": lambda x, w, row: jnp.sin(lax.cumsum(x, 1)),
    "fori": lambda x, w, row: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c * row), x),
    "inner": _inner,
    "matmul": lambda x, w, row: jnp.tanh(x @ w),
    "mean": lambda x, w, row: x - x.mean(0, keepdims=True),
    "roll": lambda x, w, row: jnp.roll(x, 1, 0) + 0.5 * x,
    "row": lambda x, w, row: jnp.sin(x + row),
    "while": _while,
}


def check(loops: Loops) -> None:
    """Raises, with the program's choices as a note, where shard_jit and jax.jit differ."""
    axes = tuple("xyz"[: len(loops.mesh)])
    devices = jax.devices()[: math.prod(loops.mesh)]
    mesh = jax.make_mesh(loops.mesh, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)
    args = loops.arguments()
    try:
        wanted = jax.jit(program(loops, lambda x, spec: x))(*args)
        annotated = program(loops, lambda x, spec: sx.annotate(x, NamedSharding(mesh, spec)))
        got = sx.shard_jit(annotated, mesh=mesh, in_shardings=loops.specs)(*args)
        compare(got, wanted)
    except Exception as error:
        error.add_note(str(loops))
        raise


def compare(got, wanted) -> None:
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            have, want = jax.random.key_data(have), jax.random.key_data(want)
        atol = 2e-4 * max(1.0, float(np.abs(want).max(initial=0))) if want.dtype == jnp.float32 else 0
        np.testing.assert_allclose(have, want, rtol=0, atol=atol)


@pytest.mark.once
@pytest.mark.parametrize("seed", range(12))
def test_random_loops(seed):
    with poisoned_padding():
        check(random_loops(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    wrong = 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            with poisoned_padding():
                check(random_loops(seed))
        except Exception as error:
            wrong += 1
            print(f"{random_loops(seed)}: {type(error).__name__} {str(error)[:500]}", flush=True)
    print(f"{given.count} programs, {wrong} differ")


if __name__ == "__main__":
    main()

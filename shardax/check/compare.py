"""compare: runs a function without shardings and under sampled ones, and names the first equation whose
results differ.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardax import _jax
from shardax.annotations.annotate import describe, flatten
from shardax.api import shard_jit
from shardax.check.first import First, first_difference
from shardax.check.shards import SLACK, difference, greatest_error, is_key, words
from shardax.ledger.words import bytes_text
from shardax.options import Options
from shardax.transform import primitive
from shardax.validation import is_integer, is_number, require, require_array, require_function

_SIZES = (2, 3, 4, 5, 8)


class Different(AssertionError):
    """A function gives other numbers under some shardings. `first` is the first equation that differs, where
    one was found.
    """

    def __init__(self, text: str, first: First | None = None):
        super().__init__(text)
        self.first = first


@dataclass(frozen=True)
class Trial:
    """One way to split a function: the mesh, and a spec or None for each leaf of the arguments and of the
    results.

    `error` is the greatest difference of a float, in relation to the greatest number of its array; `sent` the
    bytes that each device sends.
    """

    mesh: Mesh
    in_shardings: tuple[Any, ...]
    out_shardings: Any
    error: float = 0.0
    sent: int = 0

    def __str__(self):
        text = f"in_shardings={self.in_shardings}, out_shardings={self.out_shardings}".replace(
            "PartitionSpec", "P"
        )
        return f"{describe(self.mesh)}: {text}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` tried, all of which was equal. `print` shows it."""

    name: str
    trials: tuple[Trial, ...]

    def __str__(self):
        lines = [f"{self.name}: equal under {len(self.trials)} shardings"]
        lines += [f"  greatest error {t.error:.1e}, sends {bytes_text(t.sent):>9}: {t}" for t in self.trials]
        return "\n".join(lines)


@_jax.boundary
def compare(
    f: Callable[..., Any],
    args: Sequence[Any],
    meshes: Sequence[Mesh | Mapping[str, int]] | None = None,
    n: int = 8,
    *,
    seed: int = 0,
    slack: float = SLACK,
    options: Options = Options(chip="slow"),  # noqa: B008  (frozen)
) -> Comparison:
    """Runs `f(*args)` under plain `jax.jit` and under `n` sampled shardings of its arguments and results, and
    compares.

    Integers, booleans and keys must be equal; floats may differ by `slack` ulps of the greatest number of
    their array, but by a sixteenth of it at most, or one ulp where that is more. Callbacks and prints of `f`
    happen in every run.

    Args:
      f: a function of pytrees of arrays, which may have annotations inside, as for `shard_jit`; or what
        `shard_jit` returned.
      args: the tuple of its arguments. Sizes that no axis divides test the most: 5 and 6 rather than 64.
      meshes: meshes, or mappings of axis names to sizes; by default all with up to three axes of 2, 3, 4, 5
        or 8 for which there are devices. Trial i takes mesh i, beginning again after the last.
      n: how many trials.
      seed: of the shardings that are drawn.
      slack: ulps that another order of sums may cost. Sums of many numbers of both signs may need more.
      options: for `shard_jit`. By default all that can be split is, however small (`Options(chip="slow")`).

    Raises:
      Different: an AssertionError. Its text has the shardings, the first equation that differs with its line,
        layouts and greatest error, and a program that reproduces it. What `shard_jit` itself raises is
        raised, with that program as a note.
      ValueError: `args` is not a tuple, or there are not enough devices for a mesh.

    >>> print(compare(lambda x: x * 2, (np.arange(5),), meshes=[{"x": 1}], n=1))
    <lambda>: equal under 1 shardings
      greatest error 0.0e+00, sends       0 B: x=1: in_shardings=(P(None,),), out_shardings=P(None,)
    """
    _check_arguments(f, meshes, n, seed, slack)
    case = _case(f, args, slack, options)
    concrete = list(map(_mesh, meshes)) if meshes is not None else _default_meshes()
    return Comparison(case.name, tuple(case.tried(concrete[i % len(concrete)], seed + i) for i in range(n)))


@dataclass(frozen=True, eq=False)
class _Case:
    """A function with its arguments on the host."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    slack: float
    options: Options

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "f")

    @property
    def chip(self) -> str:
        """As an argument in source, if it is a known one."""
        return (
            f", options=shardax.Options(chip={self.options.chip!r})"
            if isinstance(self.options.chip, str)
            else ""
        )

    @functools.cache  # noqa: B019  (a case lives as long as one call of compare)
    def expected(self, axes: tuple[str, ...]) -> Any:
        """The results under plain `jax.jit`, on one device: a mesh of axes of size one, so that annotations
        are understood.
        """
        with jax.set_mesh(_mesh(dict.fromkeys(axes, 1))):
            return jax.jit(self.fun)(*self.args)

    def tried(self, mesh: Mesh, seed: int) -> Trial:
        """One trial, as its seed draws it."""
        dice, expected = random.Random(seed), self.expected(mesh.axis_names)
        ins = jax.tree.map(lambda x: _spec(dice, mesh, np.shape(x)), self.args)
        outs = jax.tree.map(lambda x: _spec(dice, mesh, x.shape) if dice.random() < 0.6 else None, expected)
        trial = Trial(mesh, ins, outs)
        step = shard_jit(self.fun, mesh=mesh, in_shardings=ins, out_shardings=outs, options=self.options)
        try:
            got, sent = step(*self.args), step.plan(*self.args).comm_bytes
        except Exception as error:
            error.add_note(f"raised by shard_jit in compare, {trial}\n{self.snippet(trial, seed)}")
            raise
        if problems := list(self.problems(got, expected)):
            raise self.different(trial, problems, step, seed)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        errors = (greatest_error(_numbers(have), _numbers(leaf)) for have, leaf in pairs)
        return replace(trial, error=max(errors, default=0.0), sent=int(sent))

    def problems(self, got: Any, expected: Any) -> Iterator[str]:
        paths, leaves, _ = flatten(expected)
        for path, expected_leaf, have in zip(paths, leaves, jax.tree.leaves(got), strict=True):
            if problem := difference(_numbers(have), _numbers(expected_leaf), self.slack):
                yield f"result{path}: {problem}"

    def different(self, trial: Trial, problems: Sequence[str], step: Any, seed: int) -> Different:
        first, words_ = _first(step, self.args, trial.mesh, self.slack)
        shown = "\n".join(f"  {problem}" for problem in problems[:8])
        return Different(
            f"{self.name} gives other numbers under {trial}\n{shown}\nThe first equation that differs: "
            f"{words_}\nTo see it again:\n{self.snippet(trial, seed)}",
            first,
        )

    def snippet(self, trial: Trial, seed: int) -> str:
        sizes, axes = tuple(trial.mesh.shape.values()), tuple(trial.mesh.shape)
        shardings = f"in_shardings={trial.in_shardings}, out_shardings={trial.out_shardings}".replace(
            "PartitionSpec", "P"
        )
        return (
            f"  shardax.check.compare({self.name}, args, meshes=[{dict(trial.mesh.shape)}], n=1, "
            f"seed={seed})\nor\n  mesh = jax.make_mesh({sizes}, {axes}, "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)})\n  shardax.shard_jit({self.name}, "
            f"mesh=mesh, {shardings}{self.chip})(*args)"
        )


def _check_arguments(f, meshes, n, seed, slack) -> None:
    require_function(f, "f of compare")
    require(is_integer(n, 0), "n of compare", n, "how many trials, such as 8")
    require(is_integer(seed), "seed of compare", seed, "a whole number")
    require(is_number(slack, 0), "slack of compare", slack, "a number of ulps, such as 64")
    example = "meshes, or mappings of axis names to sizes, such as [{'x': 4, 'y': 2}]"
    listed = isinstance(meshes, Sequence) and not isinstance(meshes, str) and len(meshes)
    require(listed or meshes is None, "meshes of compare", meshes, example)
    for mesh in meshes or ():
        sizes = isinstance(mesh, Mapping) and all(
            isinstance(a, str) and is_integer(k, 1) for a, k in mesh.items()
        )
        require(sizes or isinstance(mesh, Mesh), "one of meshes of compare", mesh, example)


def _case(f: Callable[..., Any], args: Sequence[Any], slack: float, options: Options) -> _Case:
    if not isinstance(args, tuple | list):
        raise ValueError(
            f"compare: args is {type(args).__name__}: give the tuple of the arguments, such as (x,)"
        )
    fun = getattr(f, "__wrapped__", f) if hasattr(f, "plan") else f  # what shard_jit returned
    paths, leaves, tree = flatten(tuple(args))
    on_host = tree.unflatten(list(map(_on_host, leaves, paths)))
    return _Case(fun, on_host, slack, options)


def _on_host(leaf: Any, path: str):
    """An argument that is committed to no device."""
    require_array(leaf, f"args{path} of compare", "an array: bind what is none with functools.partial")
    return leaf if is_key(jax.typeof(leaf)) or not hasattr(leaf, "dtype") else np.asarray(leaf)


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(words(x))


def _first(step: Any, args: tuple[Any, ...], mesh: Mesh, slack: float) -> tuple[First | None, str]:
    """The first equation that differs, and words for it, or for why there is none."""
    try:
        decisions, inputs = _decided(step, args, mesh)
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        first = first_difference(decisions, inputs, auto, slack)
    except Exception as error:  # what is to be reported is the difference, whatever the search meets
        return None, f"not found, the search raised {type(error).__name__}: {str(error)[:500]}"
    return first, str(first or "none alone; each is right by itself while all intermediates are kept")


def _decided(step: Any, args: tuple[Any, ...], mesh: Mesh):
    """The decisions of the program of a call, and its inputs, what the function closes over among them."""
    traced = step.trace(*args)
    (eqn,) = (e for e in traced.jaxpr.eqns if e.primitive is primitive.shard_jit_p)
    leaves = jax.tree.leaves(args)
    consts = _jax.constant_values(traced.jaxpr, eqn.invars[len(leaves) :])
    jaxpr = eqn.params["jaxpr"]
    program = primitive.build(jaxpr, (None,) * len(jaxpr.in_avals), mesh, eqn.params["options"])
    return program.decisions, [
        jnp.asarray(x, a.dtype) for x, a in zip((*leaves, *consts), jaxpr.in_avals, strict=True)
    ]


def _spec(dice: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """Each axis of the mesh on some dim, or with a chance of one in four on none."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in dice.sample(mesh.axis_names, len(mesh.axis_names)):
        if shape and dice.random() < 0.75:
            dice.choice([d for d, n in zip(dims, shape, strict=True) if n > 1] or dims).append(axis)
    return P(*(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims))


def _mesh(mesh: Mesh | Mapping[str, int]) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    devices, count = jax.devices(), math.prod(mesh.values())
    if count > len(devices):
        raise ValueError(
            f"compare: the mesh ({', '.join(f'{a}={n}' for a, n in mesh.items())}) needs {count} devices, "
            f"there are {len(devices)}: give a smaller one, or begin with "
            f"jax.config.update('jax_num_cpu_devices', {count})"
        )
    types = (AxisType.Auto,) * len(mesh)
    return jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=types, devices=devices[:count])


def _default_meshes() -> list[Mesh]:
    """All that there are devices for, in an order that is mixed and always the same."""
    count = len(jax.devices())
    if count < 2:
        raise ValueError(
            "compare: there is one device, so nothing can be split: begin with "
            "jax.config.update('jax_num_cpu_devices', 8), or give meshes=[{'x': 1}]"
        )
    shapes = [s for k in (1, 2, 3) for s in itertools.product(_SIZES, repeat=k) if math.prod(s) <= count]
    random.Random(0).shuffle(shapes)
    return [_mesh(dict(zip("xyz", shape, strict=False))) for shape in shapes]

"""Shampoo and SOAP, which optax has not: optimizers of arrays that keep a matrix for each dim of each array.

The statistic of a dim of size n, f32[n, n], is the moving average of the gradient times its transpose, summed
over all other dims. Of k dims that have one:

    Shampoo   the gradient, times the -1/(2k)-th power of each statistic      (Gupta et al., arXiv 1802.09568)
    SOAP      Adam, in the basis of the eigenvectors of the statistics        (Vyas et al., arXiv 2409.11321)

Powers and bases are made anew every few steps, under `lax.cond`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

Statistics = tuple[Array | None, ...]  # by dim
Root = Callable[[Array, int], Array]  # a matrix and p to its power of -1/p


class ShampooState(NamedTuple):
    count: Array
    statistics: list[Statistics]  # by array
    powers: list[Statistics]
    momentum: Any


class SoapState(NamedTuple):
    count: Array
    statistics: list[Statistics]
    bases: list[Statistics]
    mu: Any
    nu: Any  # in the bases


def root_by_eigh(x: Array, p: int) -> Array:
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * values[None] ** (-1 / p)) @ vectors.T


def root_by_newton(x: Array, p: int) -> Array:
    """The coupled iteration of Newton, as long as it converges (Guo and Higham 2006; Anil et al., arXiv
    2002.09018).
    """
    unit = jnp.eye(len(x), dtype=x.dtype)
    scale = (1 + p) / (2 * jnp.linalg.norm(x))

    def step(carry):
        near_unit, root, error, _ = carry
        factor = (1 + 1 / p) * unit - near_unit / p
        near_unit = jnp.linalg.matrix_power(factor, p) @ near_unit
        return near_unit, root @ factor, jnp.abs(near_unit - unit).max(), error

    def goes_on(carry):
        *_, error, before = carry
        return (error > 1e-6) & (error < before)

    start = x * scale, unit * scale ** (1 / p), jnp.float32(1e30), jnp.float32(jnp.inf)
    return jax.lax.while_loop(goes_on, step, start)[1]


def shampoo(
    rate: float,
    root: Root = root_by_eigh,
    every: int = 2,
    decay: float = 0.9,
    ridge: float = 0.02,
    largest: int = 64,
) -> optax.GradientTransformation:
    """`ridge` is added to statistics, relative to their mean eigenvalue; dims beyond `largest` have none."""

    def init(params: Any) -> Any:
        statistics = _by_array(params, largest, jnp.zeros)
        momentum = jax.tree.map(jnp.zeros_like, params)
        return ShampooState(jnp.zeros((), "int32"), statistics, _by_array(params, largest, _units), momentum)

    def powers_of(statistics):
        return [_mapped(lambda x, xs=xs: root(_ridged(x, ridge), 2 * _count(xs)), xs) for xs in statistics]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(updates)
        statistics = _averaged(state.statistics, leaves, decay)
        powers = jax.lax.cond(state.count % every == 0, lambda: powers_of(statistics), lambda: state.powers)
        conditioned = tree.unflatten(map(_times, leaves, powers))
        momentum = jax.tree.map(lambda m, g: decay * m + g, state.momentum, conditioned)
        steps = jax.tree.map(lambda m: -rate * m, momentum)
        return steps, ShampooState(state.count + 1, statistics, powers, momentum)

    return optax.GradientTransformation(init, update)


def soap(
    rate: float,
    every: int = 2,
    decay: float = 0.9,
    eps: float = 1e-4,
    ridge: float = 0.02,
    largest: int = 64,
) -> optax.GradientTransformation:
    """The bases begin as unit matrices, and take a step of orthogonal iteration, by QR, `every` few steps.

    The paper begins with those of `eigh`: of a gradient without full rank these are arbitrary, and would let
    no two programs be compared.
    """

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        statistics = _by_array(params, largest, jnp.zeros)
        return SoapState(jnp.zeros((), "int32"), statistics, _by_array(params, largest, _units), zeros, zeros)

    def turned(statistics, bases):
        def one(x, basis):
            return jnp.linalg.qr(_ridged(x, ridge) @ basis)[0]

        return [
            tuple(b if x is None else one(x, b) for x, b in zip(*pair, strict=True))
            for pair in zip(statistics, bases, strict=True)
        ]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(updates)
        statistics = _averaged(state.statistics, leaves, decay)
        bases = jax.lax.cond(
            state.count % every == 0, lambda: turned(statistics, state.bases), lambda: state.bases
        )
        into = [_mapped(jnp.transpose, xs) for xs in bases]
        mu = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state.mu, updates)
        rotated = tree.unflatten(map(_times, leaves, into))
        nu = jax.tree.map(lambda v, g: decay * v + (1 - decay) * g * g, state.nu, rotated)
        steps = [
            _times(_times(m, i) / (jnp.sqrt(v) + eps), b)
            for m, v, i, b in zip(jax.tree.leaves(mu), jax.tree.leaves(nu), into, bases, strict=True)
        ]
        return tree.unflatten([-rate * step for step in steps]), SoapState(
            state.count + 1, statistics, bases, mu, nu
        )

    return optax.GradientTransformation(init, update)


def _by_array(params: Any, largest: int, make: Callable[[tuple[int, int]], Array]) -> list[Statistics]:
    return [
        tuple(make((n, n)) if 1 < n <= largest else None for n in x.shape) for x in jax.tree.leaves(params)
    ]


def _units(shape: tuple[int, int]) -> Array:
    return jnp.eye(shape[0])


def _mapped(f: Callable[[Array], Array], xs: Statistics) -> Statistics:
    return tuple(None if x is None else f(x) for x in xs)


def _count(xs: Statistics) -> int:
    return sum(x is not None for x in xs)


def _averaged(statistics: Sequence[Statistics], grads: Sequence[Array], decay: float) -> list[Statistics]:
    def one(g, dim, x):
        others = [d for d in range(g.ndim) if d != dim]
        return None if x is None else decay * x + (1 - decay) * jnp.tensordot(g, g, (others, others))

    return [
        tuple(one(g, dim, x) for dim, x in enumerate(xs)) for g, xs in zip(grads, statistics, strict=True)
    ]


def _ridged(x: Array, ridge: float) -> Array:
    return x + (ridge * jnp.trace(x) / len(x) + 1e-12) * jnp.eye(len(x))


def _times(g: Array, matrices: Statistics) -> Array:
    """Each dim of g times the matrix of that dim."""
    for dim, x in enumerate(matrices):
        if x is not None:
            g = jnp.moveaxis(jnp.tensordot(x, g, (1, dim)), 0, dim)
    return g


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(0.02, weight_decay=0.1),
    "shampoo": lambda: shampoo(0.02),
    "by newton": lambda: shampoo(0.02, root_by_newton),
    "soap": lambda: soap(0.02),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.muon(0.02)),
    "accumulating": lambda: optax.MultiSteps(soap(0.02), 2).gradient_transformation(),
    "skipping": lambda: optax.apply_if_finite(optax.contrib.muon(0.02), 2),
}

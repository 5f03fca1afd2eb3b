"""Runs the program of one microbatch for several at once.

    one after the other               at once
    x w                               one product, of the rows of all
    statistics of the rows            of each microbatch its own
    total += x^T dy                   one product, in which the sum over microbatches is one over rows
    table[i] += rows                  all rows added to one table

A batched product and then a sum would make an array as large as the weights for each microbatch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.extend.random import threefry2x32_p
from jax.interpreters import batching

from shardax import _jax
from shardax.annotations.explicit import as_at
from shardax.explain.live import live
from shardax.graph.evaluate import bound
from shardax.pipeline.cut import variables
from shardax.pipeline.passes import accumulated
from shardax.spmd_rules.random import is_drawn_per_key

_PART = 1 / 16  # of a device's memory, that microbatches take which are computed at once

Env = Mapping[Any, Any]
Makers = Mapping[Any, Any]


def group_size(jaxpr, own: int, memory: float) -> int:
    """How many of a stage's `own` microbatches run at once: a divisor of their number, such that what they
    compute takes at most a sixteenth of `memory`, a device's. `jaxpr`: of one of them.

    >>> jaxpr = jax.make_jaxpr(jnp.sin)(jnp.zeros(250))
    >>> group_size(jaxpr, 6, 16 * 2500), group_size(jaxpr, 6, 16 * 3500)
    (2, 3)
    """
    fitting = _PART * memory / max(1, live(_jax.closed(jaxpr).jaxpr).peak)
    return max(n for n in range(1, own + 1) if own % n == 0 and (n == 1 or n <= fitting))


class Together:
    """Equations of one microbatch, for a group of them.

    Args:
      whole: by variable, what all microbatches read.
      rows: by variable, [group, ...], what each reads of its own.
      counts: bool[group], which are to be added up; None: all.
    """

    def __init__(self, eqns: Sequence[Any], whole: Env, rows: Env, counts: Array | None = None):
        self.eqns, self.counts = eqns, counts
        self.whole, self.rows = dict(whole), dict(rows)
        self.makers: Makers = {v: eqn for eqn in eqns for v in eqn.outvars}

    def run(self, wanted: Sequence[Any], sums: int) -> tuple[list[Array], list[Array]]:
        """The first `sums` of what is wanted, added up, and the others, [group, ...] each."""
        late = self._late(wanted, sums)
        for eqn in self.eqns:
            if late.isdisjoint(eqn.outvars):
                self._evaluate(eqn)
        return [self._total(v, v in late) for v in wanted[:sums]], [self._of_each(v) for v in wanted[sums:]]

    def _late(self, wanted: Sequence[Any], sums: int) -> set[Any]:
        """The sums that have a rule, where nothing reads what is added up."""
        read = {*variables(wanted[sums:]), *(v for eqn in self.eqns for v in variables(eqn.invars))}
        alone = (v for v in variables(wanted[:sums]) if v in self.makers and v not in read)
        return {v for v in alone if self._has_rule(self.makers[v])}

    def _has_rule(self, eqn) -> bool:
        fits, _ = _SUMS.get(eqn.primitive.name, (None, None))
        return fits is not None and fits(eqn, self.makers)

    def _read(self, atom) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        return self.rows[atom] if atom in self.rows else self.whole[atom]

    def _is_own(self, atom) -> bool:
        return not isinstance(atom, Literal) and atom in self.rows

    def _of_each(self, atom) -> Array:
        x = jnp.asarray(self._read(atom))
        return x if self._is_own(atom) else jnp.broadcast_to(x, (self._count, *x.shape))

    @property
    def _count(self) -> int:
        return len(next(iter(self.rows.values())))

    def _evaluate(self, eqn) -> None:
        operands, own = list(map(self._read, eqn.invars)), list(map(self._is_own, eqn.invars))
        if not any(own):
            self.whole.update(zip(eqn.outvars, bound(eqn, operands), strict=True))
            return
        if eqn.primitive is threefry2x32_p:  # jax.vmap of some of its operands has a loop of wrong types
            operands, own = list(map(self._of_each, eqn.invars)), [True] * len(own)
        made = (_batched if _is_batchable(eqn) else _one_by_one)(eqn, operands, own)
        self.rows.update(zip(eqn.outvars, made, strict=True))

    def _total(self, v, is_late: bool) -> Array:
        dtype = accumulated(v.aval)
        if not is_late:
            return self._counted(self._of_each(v)).astype(dtype).sum(0)
        eqn = self.makers[v]
        first, second = map(self._of_each, eqn.invars[-2:])
        _, rule = _SUMS[eqn.primitive.name]
        return rule(eqn, first, self._counted(second)).astype(dtype)

    def _counted(self, x: Array) -> Array:
        """With zeros where a microbatch is not to be added."""
        return x if self.counts is None else jnp.where(lax.expand_dims(self.counts, range(1, x.ndim)), x, 0)


# Equations of several microbatches


def _is_batchable(eqn) -> bool:
    """Whether `jax.vmap` makes what the equation makes of each microbatch alone."""
    return (
        not _jax.has_effects(eqn)
        and eqn.primitive in batching.fancy_primitive_batchers
        and is_drawn_per_key(eqn)
        and (eqn.primitive is not threefry2x32_p or len({v.aval.shape for v in eqn.invars}) == 1)
        and all(_is_batchable(inner) for body in jaxprs_in_params(eqn.params) for inner in body.eqns)
    )


def _batched(eqn, operands: Sequence[Any], own: Sequence[bool]) -> list[Any]:
    return jax.vmap(lambda *xs: bound(eqn, xs), [0 if is_own else None for is_own in own])(*operands)


def _one_by_one(eqn, operands: Sequence[Any], own: Sequence[bool]) -> list[Any]:
    def run(rows):
        each = iter(rows)
        return bound(eqn, [next(each) if is_own else x for x, is_own in zip(operands, own, strict=True)])

    return lax.map(run, list(itertools.compress(operands, own)))


# Sums over microbatches, of the last two operands; the second has zeros for those that are not added up


def _product(eqn, x: Array, y: Array) -> Any:
    contracted, batch = (
        [tuple(d + 1 for d in dims) for dims in both] for both in eqn.params["dimension_numbers"]
    )
    numbers = tuple((0, *dims) for dims in contracted), tuple(batch)
    return bound(eqn, [x, y], dimension_numbers=numbers, preferred_element_type=_kept(eqn))[0]


def _kept(eqn) -> np.dtype:
    """In which sums are added up."""
    return np.dtype(accumulated(eqn.outvars[0].aval))


def _convolution(eqn, x: Array, kernel: Array) -> Any:
    """Products are added over the feature dim, of which each microbatch has a part then."""
    numbers = eqn.params["dimension_numbers"]
    merged = [_merged(x, numbers.lhs_spec[1]), _merged(kernel, numbers.rhs_spec[1])]
    return bound(eqn, merged, preferred_element_type=_kept(eqn))[0]


def _merged(x: Array, dim: int) -> Array:
    """[group, ...] with the group inside of a dim of the rest, so that who splits that dim still does."""
    x = jnp.moveaxis(x, 0, dim + 1)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _scatter(eqn, indices: Array, updates: Array) -> Any:
    zeros, numbers = jnp.zeros(eqn.outvars[0].aval.shape, _kept(eqn)), eqn.params["dimension_numbers"]
    window = tuple(d + 1 for d in numbers.update_window_dims)
    numbers = numbers._replace(update_window_dims=window)
    with as_at(eqn):
        return lax.scatter_add(zeros, indices, updates.astype(zeros.dtype), numbers, mode=eqn.params["mode"])


def _is_ungrouped(eqn, _: Makers) -> bool:
    return eqn.params["feature_group_count"] == 1


def _is_into_zeros(eqn, makers: Makers) -> bool:
    return not eqn.params["dimension_numbers"].operand_batching_dims and _is_zero(eqn.invars[0], makers)


def _is_zero(atom, makers: Makers) -> bool:
    """Whether it is a literal zero, broadcast."""
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    made = makers.get(atom)
    return made is not None and made.primitive.name == "broadcast_in_dim" and _is_zero(made.invars[0], makers)


_SUMS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "conv_general_dilated": (_is_ungrouped, _convolution),
    "dot_general": (lambda *_: True, _product),
    "scatter-add": (_is_into_zeros, _scatter),
}

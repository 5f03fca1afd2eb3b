"""Inside: annotations on gradients where they are made, and on copies of parameters until they are used.

The search alone decides for what sends least. ZeRO also means to keep less, and so it is annotated where what
lies:

    gradients     of layers in a loop: each is scattered as it is made, in the loop's own results
                  that several microbatches are added to: scattered, or not yet reduced
    parameters    cast to the compute dtype: split until a layer reads them
                  for the backward pass: split, and gathered again, one ahead of the layer that reads it
                  of the next layer, where a loop prefetches: whole, in the loop's carry
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from shardax import _jax
from shardax.annotations.annotate import bind_annotation
from shardax.differentiated import is_transposed
from shardax.graph.equations import equations_like
from shardax.sharding import Axes, Sharding
from shardax.zero.again import gathered_again, results_first
from shardax.zero.ahead import ahead
from shardax.zero.padded import is_cut

Known = Sequence[Sharding | None]
"""For each of some variables: how the parameter rests of which it is a copy, maybe in another dtype; else
None.
"""

OfShape = Mapping[tuple[int, ...], Sharding]


@dataclass(frozen=True)
class Inside:
    """What is annotated in a program, as `source`.

    made: gradients that a loop of the backward pass makes row by row.
    accumulated: what `accumulators` accumulate, by the `id` of a loop's equation the numbers of its carries.
    again: whether parameters are gathered again for the backward pass.
    prefetched: the axes over which a loop gathers the parameters of the next layer, if any.
    scope: that of the equation around, where it has one; `in_loop`: whether that is a loop.
    """

    source: str
    made: OfShape
    accumulated: OfShape
    accumulators: Mapping[int, Sequence[int]]
    again: bool
    prefetched: Axes = ()
    scope: str = ""
    in_loop: bool = False

    def annotated(self, jaxpr, known: Known) -> tuple[Any, Known]:
        """The jaxpr, closed or open, and what is known of its results; `known` is of its arguments."""
        opened = _jax.closed(jaxpr).jaxpr
        env = {v: s for v, s in zip(opened.invars, known, strict=True) if s is not None}
        eqns: list[Any] = []
        reading: dict[int, Known] = {}
        for eqn in opened.eqns:
            inside = self._around(eqn)
            if inside._gathers_again(eqn, env):
                reading[len(eqns)] = [_known(v, env) for v in eqn.invars]
                eqns.append(eqn)
            else:
                eqns.extend(inside._changed(eqn, env))
        found, outvars = [_known(v, env) for v in opened.outvars], opened.outvars
        if reading:
            first = next(iter(reading))
            eqns, place, outvars = results_first(eqns, first, outvars)
            reading = {n + place - first: known for n, known in reading.items()}
        eqns = gathered_again(eqns, reading, self._annotation)
        return _jax.with_eqns_and_results(jaxpr, eqns, outvars), found

    def _around(self, eqn) -> "Inside":
        return replace(self, scope=f"{self.scope}/{eqn.source_info.name_stack}")

    @property
    def _in_backward_pass(self) -> bool:
        return is_transposed(self.scope)

    def _changed(self, eqn, env: dict[Any, Sharding]) -> Iterator[Any]:
        known = [_known(v, env) for v in eqn.invars]
        change = _CHANGES.get(eqn.primitive.name)
        if change is not None:
            eqns, found = change(self, eqn, known)
            env.update((v, s) for v, s in zip(eqn.outvars, found, strict=True) if s is not None)
            yield from eqns
        else:
            yield eqn

    def _gathers_again(self, eqn, env: Mapping[Any, Sharding]) -> bool:
        return (
            self.again
            and self._in_backward_pass
            and not self.in_loop
            and eqn.primitive.name not in _CHANGES
            and not _jax.has_bodies(eqn)
            and any(_known(v, env) for v in eqn.invars)
        )

    def _inner(self, eqn, known: Known, wanted=None) -> tuple[Any, Known]:
        """An equation with one body, its results annotated as `wanted` has it of what is known of them."""
        inner, found = replace(self, in_loop=self.in_loop or wanted is not None), []

        def change(jaxpr):
            new, results = inner.annotated(jaxpr, known)
            found.append(results)
            return new if wanted is None else self._with_results(new, wanted(results))

        return _jax.with_bodies(eqn, change), found[-1]

    def _with_results(self, jaxpr, wanted: Known):
        opened = _jax.closed(jaxpr).jaxpr
        outvars, eqns = list(opened.outvars), list(opened.eqns)
        makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        for k, sharding in enumerate(wanted):
            maker = None if _jax.is_literal(outvars[k]) else makers.get(outvars[k])
            if sharding is not None and maker is not None:
                (new,), (outvars[k],) = equations_like(
                    maker, lambda x, s=sharding: self._annotation(x, s), [outvars[k]]
                )
                eqns.append(new)
        return _jax.with_eqns_and_results(jaxpr, eqns, outvars)

    def _annotated(self, eqn, shardings: Known) -> list[Any]:
        """The equation, some of its results annotated."""
        made = [
            v if s is None else _jax.new_variable(v.aval) for v, s in zip(eqn.outvars, shardings, strict=True)
        ]
        eqns = [eqn.replace(outvars=made)]
        for x, result, sharding in zip(made, eqn.outvars, shardings, strict=True):
            if sharding is not None:
                (new,), _ = equations_like(eqn, lambda x, s=sharding: self._annotation(x, s), [x])
                eqns.append(new.replace(outvars=[result]))
        return eqns

    def _ahead(self, eqn, annotated, rows: Known, results: Known) -> list[Any]:
        """The loop `annotated`, made of `eqn`, gathers rows that are known one trip before they are read."""
        start = sum(_jax.scan_counts(eqn.params))
        known = {k: s.without(self.prefetched) for k, s in enumerate(rows) if k >= start and s is not None}
        if not known:
            return [annotated]
        others = [None if k in known else s for k, s in enumerate(rows)]
        body = self._inner(eqn, others, lambda _: results)[0].params["jaxpr"]
        return ahead(annotated, body, list(known), lambda x, k: self._annotation(x, known[k]))

    def _annotation(self, x, sharding: Sharding):
        return bind_annotation(x, sharding.dims, self.source, "state", owing=sharding.owing)


Changed = tuple[list[Any], Known]  # equations in the place of one, and what is known of its results


def _call(inside: Inside, eqn, known: Known) -> Changed:
    new, found = inside._inner(eqn, known)
    return [new], found


def _cast(inside: Inside, eqn, known: Known) -> Changed:
    return inside._annotated(eqn, known) if any(known) else [eqn], known


def _cut(inside: Inside, eqn, known: Known) -> Changed:
    """A parameter that rests padded, in its true shape; of other slices nothing is known."""
    return _cast(inside, eqn, known if is_cut(eqn) else [None])


def _annotated_before(inside: Inside, eqn, known: Known) -> Changed:
    """Where axes are Explicit, JAX types each gradient as its parameter. That it is whole does not mean that
    all of it is wanted everywhere.
    """
    if inside._in_backward_pass and eqn.params["role"] == "implied":
        dims = tuple(axes or None for axes in eqn.params["dims"])
        eqn = eqn.replace(params={**eqn.params, "dims": dims})
    return [eqn], known


def _scan(inside: Inside, eqn, known: Known) -> Changed:
    """What is known of what is scanned over is known of its rows, and the other way round."""
    consts, carries = _jax.scan_counts(eqn.params)
    carried = [
        _of(inside.accumulated, v) if k in inside.accumulators.get(id(eqn), ()) else None
        for k, v in enumerate(eqn.outvars[:carries])
    ]
    made = [_row(_of(inside.made, v) if inside._in_backward_pass else None) for v in eqn.outvars[carries:]]

    def wanted(found: Known) -> Known:
        return [
            *carried,
            *(m or s if inside.again else m for m, s in zip(made, found[carries:], strict=True)),
        ]

    rows = [*known[:consts], *[None] * carries, *map(_row, known[consts + carries :])]
    new, found = inside._inner(eqn, rows, wanted)
    stacked = [s and Sharding(((), *s.dims)) for s in found[carries:]]
    loop, *others = inside._annotated(new, [*carried, *[None] * len(stacked)])
    loops = inside._ahead(eqn, loop, rows, wanted(found)) if inside.prefetched else [loop]
    return [*loops, *others], [*[None] * carries, *stacked]


_CHANGES = {
    "annotate": _annotated_before,
    "convert_element_type": _cast,
    "jit": _call,
    "pjit": _call,
    "scan": _scan,
    "slice": _cut,
}


def _known(atom, env: Mapping[Any, Sharding]) -> Sharding | None:
    return None if _jax.is_literal(atom) else env.get(atom)


def _of(shardings: OfShape, var) -> Sharding | None:
    return shardings.get(var.aval.shape) if jnp.issubdtype(var.aval.dtype, jnp.inexact) else None


def _row(sharding: Sharding | None) -> Sharding | None:
    """That of what a loop goes over, one by one; None where it is split over these."""
    return None if sharding is None or sharding.dims[0] else Sharding(sharding.dims[1:], sharding.owing)

"""Flipped: a loop over layers that are read in reverse goes over them backwards, as they rest.

    ws = w[::-1]                                     h, ys = scan(layer, h, w, reverse=True)
    h, ys = scan(layer, h, ws)
    ... scan(back, g, (ws, ys), reverse=True)        ... scan(back, g, (w, ys))

So its trips read rows of the parameters, and not of an array that would be made of all of them, and moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.explicit import as_at, shape_of
from shardax.graph.evaluate import bound
from shardax.passes.segments import is_elementwise


def unflipped(closed):
    """The program, in which a scan of which most is scanned in reverse goes the other way; the same, where
    there is none.
    """
    if not any(_is_reversal(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    made = jax.make_jaxpr(lambda *args: _Unflipped(closed).run(args))(*map(shape_of, closed.in_avals))
    return _jax.dce(made)


def _is_reversal(eqn) -> bool:
    """Whether an equation reverses the first dim alone."""
    return eqn.primitive.name == "rev" and tuple(eqn.params["dimensions"]) == (0,)


@dataclass
class _Unflipped:
    """`reverse`: of variables that are the reverse of a value, that value."""

    closed: Any
    env: dict[Any, Any] = field(default_factory=dict)
    reverse: dict[Any, Any] = field(default_factory=dict)

    def run(self, args: Sequence[Any]) -> list[Any]:
        jaxpr = self.closed.jaxpr
        self.env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*self.closed.consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            with as_at(eqn):
                self._add(eqn)
        return list(map(self._read, jaxpr.outvars))

    def _read(self, atom) -> Any:
        return atom.val if _jax.is_literal(atom) else self.env[atom]

    def _reverse_of(self, atom) -> Any:
        return None if _jax.is_literal(atom) else self.reverse.get(atom)

    def _add(self, eqn) -> None:
        if _is_reversal(eqn):
            self._add_reversal(eqn)
        elif eqn.primitive.name == "scan" and self._is_mostly_reversed(eqn):
            self._add_scan(eqn)
        else:
            made = bound(eqn, list(map(self._read, eqn.invars)))
            self.env.update(zip(eqn.outvars, made, strict=True))
            if is_elementwise(eqn):
                self._note_elementwise(eqn)

    def _add_reversal(self, eqn) -> None:
        (operand,), (result,) = eqn.invars, eqn.outvars
        before = self._reverse_of(operand)
        self.reverse[result] = self._read(operand)
        self.env[result] = jax.lax.rev(self._read(operand), (0,)) if before is None else before

    def _note_elementwise(self, eqn) -> None:
        """What is computed of reversed arrays, number by number, is the reverse of the same of them."""
        arrays = [v for v in eqn.invars if v.aval.shape]
        if all(self._reverse_of(v) is not None for v in arrays):
            operands = [self._reverse_of(v) if v.aval.shape else self._read(v) for v in eqn.invars]
            (self.reverse[eqn.outvars[0]],) = bound(eqn, operands)

    def _scanned(self, eqn) -> list[Any]:
        return eqn.invars[sum(_jax.scan_counts(eqn.params)) :]

    def _is_mostly_reversed(self, eqn) -> bool:
        sizes = [(v.aval.size * v.aval.dtype.itemsize, self._reverse_of(v)) for v in self._scanned(eqn)]
        return 2 * sum(n for n, before in sizes if before is not None) > sum(n for n, _ in sizes)

    def _add_scan(self, eqn) -> None:
        rows = self._scanned(eqn)
        operands = list(map(self._read, eqn.invars[: len(eqn.invars) - len(rows)]))
        for v in rows:
            before = self._reverse_of(v)
            operands.append(jax.lax.rev(self._read(v), (0,)) if before is None else before)
        made = bound(eqn, operands, reverse=not eqn.params["reverse"])
        carries = _jax.scan_counts(eqn.params)[1]
        self.env.update(zip(eqn.outvars[:carries], made[:carries], strict=True))
        for v, x in zip(eqn.outvars[carries:], made[carries:], strict=True):
            self.reverse[v], self.env[v] = x, jax.lax.rev(x, (0,))

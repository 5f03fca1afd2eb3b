"""Sends once what is sent twice: equal collectives of a local program, and halos of one value that overlap or
touch.

A convolution and the gradient of its kernel want the same rows from their neighbours; a stencil by slices
wants one row in one place and two rows in another. To see that slices are of one shard, equal computations
count as one value, but only collectives are left out. A value behind an optimization barrier is another
value: what remat recomputes is sent again.

    ppermute x[14:16]    ppermute x[15:16]    ->    h = ppermute x[14:16]    h    h[1:2]
"""

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from shardax import _jax
from shardax.ledger.collectives import KINDS
from shardax.rewrites.numbering import params_key
from shardax.spmd_rules.registry import RULES


def shared(jaxpr):
    """The same jaxpr, closed or open, without collectives that send what a device already has; so are its
    bodies.
    """
    eqns = [_jax.with_bodies(eqn, shared) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    if not any(eqn.primitive.name in KINDS for eqn in eqns):
        return _jax.replaced_eqns(jaxpr, eqns)
    sharer = _Sharer(eqns)
    kept = [new for eqn in eqns for new in sharer.eqn(eqn)]
    return _jax.with_eqns_and_results(jaxpr, kept, [sharer.read(v) for v in _jax.closed(jaxpr).jaxpr.outvars])


@dataclass(frozen=True)
class _Halo:
    """A ppermute of rows `first` to before `end` along `dim` of a value. `sends`: of which value, and who
    sends to whom.
    """

    sends: Hashable
    dim: int
    first: int
    end: int

    @property
    def group(self) -> Hashable:
        return self.sends, self.dim


class _Sharer:
    def __init__(self, eqns):
        self.values: dict[Any, Any] = {}  # the first variable of the same value
        self.numbers: dict[Hashable, int] = {}
        self.kinds: dict[Hashable, int | None] = {}  # by identity: what runs alike has the same parameters
        self.computed: dict[int, Any] = {}
        self.makers: dict[Any, Any] = {}
        self.stands: dict[Any, Any] = {}
        self.sent: dict[Hashable, Any] = {}  # by number; halos by rows
        self.keys: dict[int, int | None] = {id(eqn): self._number(eqn) for eqn in eqns}
        self.parts = _joined(filter(None, map(self._halo, eqns)))

    def read(self, atom):
        return atom if _jax.is_literal(atom) else self.stands.get(atom, atom)

    def eqn(self, eqn) -> Iterator[Any]:
        """What is left of an equation."""
        key, invars = self.keys[id(eqn)], list(map(self.read, eqn.invars))
        if any(map(operator.is_not, invars, eqn.invars)):
            eqn = eqn.replace(invars=invars)
        if halo := self._halo(eqn):
            yield from self._cut(eqn, halo, *self.parts[halo])
        elif eqn.primitive.name in KINDS and key in self.sent:
            self.stands.update(zip(eqn.outvars, self.sent[key], strict=True))
        else:
            if eqn.primitive.name in KINDS and key is not None:
                self.sent[key] = eqn.outvars
            yield eqn

    def _cut(self, eqn, halo: _Halo, first: int, end: int) -> Iterator[Any]:
        """The rows of a halo out of those, `first` to before `end`, that are sent of this value this way."""
        key = (halo.group, first, end)
        if key not in self.sent:
            cut = self.makers[eqn.invars[0]]
            shape = cut.invars[0].aval.shape
            part = _sliced(cut, self.read(cut.invars[0]), halo.dim, first, end, shape)
            sent = eqn.replace(invars=part.outvars, outvars=[_jax.new_variable(part.outvars[0].aval)])
            self.sent[key] = sent.outvars
            yield from (part, sent)
        (received,) = self.sent[key]
        if (first, end) == (halo.first, halo.end):
            self.stands[eqn.outvars[0]] = received
        else:
            cut = self.makers[eqn.invars[0]]
            rows = _sliced(cut, received, halo.dim, halo.first - first, halo.end - first, received.aval.shape)
            yield rows.replace(outvars=eqn.outvars)

    def _number(self, eqn) -> int | None:
        """Numbers what an equation makes; returns the number of what it computes."""
        key = self._key(eqn)
        first = eqn if key is None else self.computed.setdefault(key, eqn)
        for v, same in zip(eqn.outvars, first.outvars, strict=True):
            self.values[v] = self.values.get(same, same)
            self.makers[v] = eqn
        return key

    def _key(self, eqn) -> int | None:
        """The number of what an equation computes, which is quicker to look up; None where it only equals
        itself.
        """
        kind = self._kind(eqn)
        if kind is None or _jax.has_effects(eqn):
            return None
        key = kind, *map(self._operand, eqn.invars)
        return self.numbers.setdefault(key, len(self.numbers))

    def _kind(self, eqn) -> int | None:
        """The number of what an equation does to its operands, by its primitive and parameters; None where it
        makes another value each time, or that cannot be compared.
        """
        same = eqn.primitive, id(eqn.params)
        if same not in self.kinds:
            params = None if _is_anew(eqn) or _jax.has_bodies(eqn) else params_key(eqn.params)
            key = None if params is None else (eqn.primitive, params)
            self.kinds[same] = None if key is None else self.numbers.setdefault(key, len(self.numbers))
        return self.kinds[same]

    def _operand(self, atom) -> Hashable:
        if not _jax.is_literal(atom):
            return self.values.get(atom, atom)
        bits = atom.aval.shape == () and not jax.numpy.issubdtype(atom.aval.dtype, jax.dtypes.extended)
        return ("literal", atom.aval, np.asarray(atom.val).tobytes() if bits else id(atom.val))

    def _halo(self, eqn) -> _Halo | None:
        """A ppermute of a slice along one dim."""
        cut = self.makers.get(eqn.invars[0]) if eqn.primitive is lax.ppermute_p else None
        if cut is None or cut.primitive is not lax.slice_p or set(cut.params["strides"] or (1,)) != {1}:
            return None
        shape, result = cut.invars[0].aval.shape, cut.outvars[0].aval.shape
        dims = [d for d, (n, k) in enumerate(zip(shape, result, strict=True)) if n != k]
        if len(dims) != 1:
            return None
        (dim,) = dims
        sends = (self._kind(eqn), self._operand(cut.invars[0]))
        return _Halo(sends, dim, cut.params["start_indices"][dim], cut.params["limit_indices"][dim])


def _is_anew(eqn) -> bool:
    """Whether an equation makes another value each time."""
    entry = RULES.get(eqn.primitive.name)
    return entry is not None and entry.anew


def _joined(halos) -> dict[_Halo, tuple[int, int]]:
    """For each halo the rows of those that overlap or touch."""
    groups: dict[Hashable, list[_Halo]] = {}
    for halo in halos:
        groups.setdefault(halo.group, []).append(halo)
    rows_of: dict[_Halo, tuple[int, int]] = {}
    for group in groups.values():
        part: list[_Halo] = []
        for halo in sorted(group, key=lambda h: h.first):
            if part and halo.first > max(h.end for h in part):
                part = []
            part.append(halo)
            rows = part[0].first, max(h.end for h in part)
            rows_of.update(dict.fromkeys(part, rows))
    return rows_of


def _sliced(like, operand, dim: int, first: int, end: int, shape):
    """An equation for rows of a value; `like` is some slice."""
    starts, ends = [0] * len(shape), list(shape)
    starts[dim], ends[dim] = first, end
    params = {**like.params, "start_indices": tuple(starts), "limit_indices": tuple(ends)}
    aval = like.outvars[0].aval.update(shape=tuple(e - s for s, e in zip(starts, ends, strict=True)))
    return like.replace(invars=[operand], outvars=[_jax.new_variable(aval)], params=params)

"""Alike: which equations of an update compute the same, of other arrays."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.annotations.annotate import annotate_p
from shardax.annotations.explicit import SHARDING_PARAMS
from shardax.differentiated import is_differentiated, is_transposed
from shardax.zero.branches import Members, is_of_bucket
from shardax.zero.padded import is_cut_or_tail


class Alike:
    """Numbers for the values of a jaxpr, equal where the same is computed, of other arrays of an update.

    kinds: of its arguments that are state, what has to be alike too.
    """

    def __init__(self, jaxpr, kinds: Mapping[int, Hashable]):
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[Any, int] = {}
        self.depends: set[Any] = set()  # on state or gradients, whose values are many
        for i, v in enumerate(jaxpr.invars):
            if i in kinds and v.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.inexact):
                self.depends.add(v)
                self._note(v, ("state", kinds[i], str(v.aval)))
        for eqn in jaxpr.eqns:
            self._see(eqn)
        self._differentiated: set[Any] = set()  # what that depends on
        for eqn in reversed(jaxpr.eqns):
            if _is_leaf(eqn) or not self._differentiated.isdisjoint(eqn.outvars):
                self._differentiated.update(v for v in eqn.invars if not _jax.is_literal(v))

    def is_packable(self, eqn) -> bool:
        """Whether it is of an update, and may be computed of a stack. What gradients are made of is not, nor
        is what only brings arrays to or from where they rest.
        """
        if not eqn.outvars or eqn.outvars[0] not in self.depends or eqn.effects:
            return False
        is_update = not _is_leaf(eqn) and self._differentiated.isdisjoint(eqn.outvars)
        return is_update and not _rests(eqn) and _has_batching_rules(eqn)

    def is_one(self, atoms: Members) -> bool:
        """Whether these have one value."""
        if len({self.number(x) for x in atoms}) > 1:
            return False
        return not self._depends(atoms[0]) or all(x is atoms[0] for x in atoms)

    def is_shared(self, atoms: Members) -> bool:
        """Whether these have one value, and are not one array of an update alone."""
        alone = len(atoms) == 1 and self._depends(atoms[0]) and bool(atoms[0].aval.shape)
        return self.is_one(atoms) and not alone

    def value(self, atom) -> Hashable:
        """The same for two that have one value."""
        return atom if self._depends(atom) else self.number(atom)

    def number(self, atom) -> int:
        if _jax.is_literal(atom):
            return self._number(("literal", str(atom.aval), _content(atom.val)))
        if atom not in self._of:
            self._note(atom, ("value", atom))
        return self._of[atom]

    def _see(self, eqn) -> None:
        depends = any(map(self._depends, eqn.invars))
        if depends or has_gradients(eqn):
            self.depends.update(eqn.outvars)
        stacks = [self._of.get(v) for v in eqn.invars if not _jax.is_literal(v)] if _rests(eqn) else []
        is_leaf = _is_leaf(eqn) or _rests(eqn) or eqn.effects or eqn.primitive.name == "rng_uniform"
        reads = None if is_leaf else (key(eqn), tuple(map(self.number, eqn.invars)))
        for j, v in enumerate(eqn.outvars):
            if reads is not None:
                self._note(v, (reads, j))
            elif v in self.depends:
                self._note(v, ("gradient", *stacks, str(v.aval)))

    def _depends(self, atom) -> bool:
        return not _jax.is_literal(atom) and atom in self.depends

    def _note(self, v, what: Hashable) -> None:
        self._of[v] = self._number(what)

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))


def _is_leaf(eqn) -> bool:
    """Whether it is differentiated, or is what makes gradients."""
    return is_differentiated(eqn.source_info.name_stack) or has_gradients(eqn)


def _has_batching_rules(eqn) -> bool:
    bodies = map(_jax.closed, jaxprs_in_params(eqn.params))
    inner = (eqn for body in bodies for eqn in body.jaxpr.eqns)
    has_own = not eqn.invars or _jax.has_batching_rule(eqn.primitive)
    return has_own and all(map(_has_batching_rules, inner))


def _rests(eqn) -> bool:
    """Whether it says how an array rests, or brings it to or from there."""
    if eqn.primitive is annotate_p:
        return True
    return is_of_bucket(eqn) or is_cut_or_tail(eqn.primitive.name, eqn.source_info.name_stack)


def key(eqn) -> Hashable:
    """What an equation does to its operands, whatever these are."""
    params = tuple((n, _key(p)) for n, p in sorted(eqn.params.items()) if n not in SHARDING_PARAMS)
    types = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive, params, types


def has_gradients(eqn) -> bool:
    """Whether it makes gradients, or what is in its bodies does."""
    bodies = jaxprs_in_params(eqn.params)
    return is_transposed(eqn.source_info.name_stack) or any(
        has_gradients(inner) for body in bodies for inner in _jax.closed(body).jaxpr.eqns
    )


def _key(param: Any) -> Hashable:
    """A parameter of an equation as a value that can be compared; of a function, or what else cannot, only
    itself.
    """
    if _jax.is_jaxpr(param):
        closed = _jax.closed(param)
        return str(closed.jaxpr), tuple(map(id, closed.consts)), tuple(_contents(closed.jaxpr))
    if isinstance(param, tuple | list):
        return tuple(map(_key, param))
    try:
        hash(param)
    except TypeError:
        return "unhashable", id(param)
    return type(param), param


def _contents(jaxpr) -> Iterator[Hashable]:
    """Those of all literals, which the text of a jaxpr may round."""
    for eqn in jaxpr.eqns:
        yield from (_content(v.val) for v in eqn.invars if _jax.is_literal(v))
        for body in jaxprs_in_params(eqn.params):
            yield from _contents(_jax.closed(body).jaxpr)
    yield from (_content(v.val) for v in jaxpr.outvars if _jax.is_literal(v))


def _content(value: Any) -> Hashable:
    x = np.asarray(value) if isinstance(value, int | float | complex | np.generic | np.ndarray) else None
    return id(value) if x is None else (x.dtype.str, x.tobytes())

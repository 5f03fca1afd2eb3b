"""Where modules begin: at the first part of a program in each named scope that a pattern matches.

Flax linen makes a scope for each module, `Model/Block_0/Dense_1`; nnx makes none; `jax.named_scope` is one by
hand.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.ledger.causes import Named
from shardax.validation import require

_TRANSFORMATIONS = frozenset({"jvp", "rematted_computation", "transpose", "vmap"})


def patterns(at: Any, what: str) -> tuple[str, ...]:
    """What is given as `at`, as patterns. ValueError where it is none, several or None."""
    found = (at,) if isinstance(at, str) else () if at is None else at
    is_some = isinstance(found, list | tuple) and all(isinstance(x, str) and x for x in found)
    require(is_some, f"at of {what}", at, "a pattern of names of scopes, such as 'Block_*', several, or None")
    return tuple(found)


def scope(eqn) -> tuple[str, ...]:
    """The scopes of an equation, the outermost first, without those that say why something is sent."""
    names = (name for name in _jax.scope_names(eqn.source_info.name_stack) if not isinstance(name, Named))
    return tuple(part for name in names if name not in _TRANSFORMATIONS for part in name.split("/"))


def module(names: Sequence[str], at: Sequence[str]) -> tuple[str, ...] | None:
    """The outermost of these scopes that a pattern matches, with those around it. A pattern with a slash
    matches several, the last of them this one.

    >>> module(("Model", "Block_0", "Dense_1"), ["Block_*"])
    ('Model', 'Block_0')
    >>> module(("Model", "Block_0", "Dense_1"), ["Block_*/Dense_1"])
    ('Model', 'Block_0', 'Dense_1')
    """
    for end in range(1, len(names) + 1):
        for pattern in at:
            own = names[max(0, end - 1 - pattern.count("/")) : end]
            if fnmatchcase("/".join(own), pattern):
                return tuple(names[:end])
    return None


def modules(eqn, at: Sequence[str]) -> tuple[str, ...] | None:
    """The module that an equation is in, or that is in it, as in the body of a scan over layers."""
    own = scope(eqn)
    inside = (module((*own, *names), at) for names in _inside(eqn))
    return module(own, at) or next(filter(None, inside), None)


def names_of(eqns: Sequence[Any]) -> list[str]:
    """The names of all scopes, in order."""
    found = (name for eqn in eqns for names in (scope(eqn), *_inside(eqn)) for name in names)
    return list(dict.fromkeys(found))


def _inside(eqn) -> Iterator[tuple[str, ...]]:
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield scope(inner)
            yield from _inside(inner)

"""Where values of many types lie in buffers that are the same on all stages.

What stages send, keep and read differs where stages differ, and one program runs on all of them. So a buffer
has *places*, each of a type: for each type as many as any list needs. A list of values takes the first places
of its types.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax import _jax

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Places:
    """`types`: of each place. `of[i]`: the places of the values of list i, in its order."""

    types: tuple[Type, ...]
    of: tuple[tuple[int, ...], ...]


def places(lists: Sequence[Sequence[Type]]) -> Places:
    """Places for lists of which one is there at a time.

    >>> f, i = jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((), "int32")
    >>> places([[f, i], [f, f]]).of
    ((0, 2), (0, 1))
    """
    most: Counter[Any] = Counter()
    for types in lists:
        most |= Counter(map(_key, types))
    first, all_ = {}, []
    for key, count in most.items():
        first[key] = len(all_)
        all_ += [Type(*key)] * count
    return Places(tuple(all_), tuple(tuple(_numbered(types, first)) for types in lists))


def _numbered(types: Iterable[Type], first: dict[Any, int]) -> Iterable[int]:
    seen: defaultdict[Any, int] = defaultdict(int)
    for type in types:
        key = _key(type)
        yield first[key] + seen[key]
        seen[key] += 1


def _key(type: Type) -> Any:
    return tuple(type.shape), type.dtype


# Random keys are stored as their words


def stored_type(type: Type) -> Type:
    """In which a value of this type is kept, and sent."""
    if not _is_key(type):
        return type
    words = jax.eval_shape(jax.random.key_data, type)
    return Type(words.shape, words.dtype)


def stored(x) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def unstored(x, type: Type) -> Any:
    return jax.random.wrap_key_data(x, impl=_jax.key_impl(type.dtype)) if _is_key(type) else x


def _is_key(x) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)

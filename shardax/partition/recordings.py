"""Recordings: what nodes of one class run on shards is traced once for all that run alike, and staged again
for the others, each on its own line and under its own names. A step of unrolled layers has many of them.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from shardax import _jax
from shardax.ledger import causes

Run = Callable[[Sequence[Any]], Sequence[Any]]


class Recordings:
    """Those of one trace, of functions that make equal values of equal operands. What has a cause is not
    recorded, as that tells of one node; see also `_jax.recorded`."""

    def __init__(self):
        self.known: dict[Hashable, _jax.Recording | None] = {}

    def run(self, kind: Hashable, function: Run, shards: Sequence[Any]) -> list[Any]:
        """What a function returns for these shards. `kind`: all else that decides what it does. Shards may be
        small constants, such as JAX makes of what depends on nothing else.
        """
        traced, types = [], list[Hashable]()
        for x in shards:
            if isinstance(x, Tracer):
                traced.append(x)
                types.append(x.aval)
            elif _is_small(x):
                types.append((x.shape, x.dtype, x.tobytes()))
            else:
                return list(function(shards))
        if not _jax.stages_each(traced):
            return list(function(shards))
        ids = [id(x) for x in traced]
        key = kind, tuple([ids.index(i) for i in ids]), tuple(types)
        if key not in self.known:
            results, recording = _jax.recorded(lambda: function(shards), traced)
            self.known[key] = recording if recording and not causes.of(recording.scopes) else None
            return results
        recording = self.known[key]
        return _jax.staged_again(recording, traced) if recording else list(function(shards))


def _is_small(constant: Any) -> bool:
    return isinstance(constant, (np.ndarray, np.generic)) and constant.size <= _SMALL


_SMALL = 16  # elements, which are compared

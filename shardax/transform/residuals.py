"""A program as two, one that runs now and one that runs later, and the residuals: what the first saves for
the second.

A residual keeps the sharding in which the forward part leaves it: annotations in both parts say which. An
uneven one is saved padded, for otherwise it would have to rest in another sharding. What is an argument,
annotated or not, is not saved: the later part takes it once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax, program
from shardax.annotations.annotate import SAVED, Dims, annotate_p, bind_annotation, renumbered
from shardax.annotations.explicit import memory_of, shape_of
from shardax.sharding import Sharding, round_up, shard_count
from shardax.trace import abstract_mesh

AnyMesh = Mesh | AbstractMesh


class NowAndLater:
    """`known` has the known inputs and results, then what it saves; `later` takes the residuals first, then
    the unknown inputs.

    `sources` has for each residual the known input that it is, None where it is the next that `known` saves.
    """

    def __init__(self, jaxpr, unknown: tuple[bool, ...], mesh: AnyMesh):
        known, later, self.unknown_outs, avals, forwarded = _jax.partial_eval_jaxpr(
            jaxpr, unknown, instantiate=False
        )
        known = renumbered(known, [not u for u in unknown])
        fresh = _ways(known, len(avals), mesh)
        self.saved = sum(isinstance(way, _Saved) for way in fresh)
        self.known = _changed(known, mesh, results=[None] * (len(known.out_avals) - len(fresh)) + fresh)
        ways = iter(fresh)
        entering = [next(ways) if f is None else _Taken(f - len(jaxpr.consts)) for f in forwarded]
        self.sources = [way.argument if isinstance(way, _Taken) else None for way in entering]
        self.later = _changed(later, mesh, arguments=entering + [None] * sum(unknown))


@dataclass(frozen=True)
class _Taken:
    """A residual that is an argument of the forward part; `annotations` are the equations between the two."""

    argument: int
    annotations: tuple[Any, ...] = ()

    def load(self, x):
        for eqn in self.annotations:
            x = bind_annotation(x, **eqn.params)
        return x


@dataclass(frozen=True)
class _Saved:
    """The layout of a residual of a shape between the two: split as `dims` say, None where nothing is known,
    padded to `stored`.
    """

    dims: Dims | None
    shape: tuple[int, ...]
    stored: tuple[int, ...]

    def store(self, x):
        x = self._annotated(x)
        if self.stored == self.shape:
            return x
        ends = [(0, padded - size, 0) for size, padded in zip(self.shape, self.stored, strict=True)]
        return self._annotated(lax.pad(x, jax.numpy.zeros((), x.dtype), ends))

    def load(self, x):
        x = self._annotated(x)
        return x if self.stored == self.shape else self._annotated(lax.slice(x, [0] * x.ndim, self.shape))

    def _annotated(self, x):
        return x if self.dims is None else bind_annotation(x, self.dims, SAVED)


def by_policy(saveable, unknown: Any, instantiated: Any, eqn):
    """The same for policies of `jax.checkpoint`, which see inside: the two equations, and what JAX asks for
    besides.
    """
    known, later, unknown_outs, instantiated_outs, new = _by_policy(saveable, unknown, instantiated, eqn)
    saved = known.outvars[len(unknown_outs) - sum(unknown_outs) :]
    if not saved:
        return known, later, unknown_outs, instantiated_outs, new
    places = tuple(map(later.invars.index, saved))
    first, second = _agreed(known.params["jaxpr"], later.params["jaxpr"], places, eqn.params["mesh"])
    stored = dict(zip(saved, map(_jax.new_variable, first.out_avals[-len(saved) :]), strict=True))
    known = known.replace(
        outvars=[stored.get(v, v) for v in known.outvars], params={**known.params, "jaxpr": first}
    )
    later = later.replace(invars=_instead(later.invars, stored), params={**later.params, "jaxpr": second})
    return known, later, unknown_outs, instantiated_outs, _instead(new, stored)


_by_policy = _jax.checkpoint_rule("jaxpr")


def _instead(atoms, new: dict[Any, Any]) -> list[Any]:
    return [atom if _jax.is_literal(atom) else new.get(atom, atom) for atom in atoms]


@_jax.weakly_cached
def _agreed(known, later, places: tuple[int, ...], mesh: AnyMesh) -> tuple[Any, Any]:
    """The two programs, once they say the same of the last results of the one: the arguments of the other at
    these places.
    """
    count = len(places)
    shardings = program.completed_results(known, mesh)[-count:]
    ways = [_saved(s, aval, mesh) for s, aval in zip(shardings, known.out_avals[-count:], strict=True)]
    entering = dict(zip(places, ways, strict=True))
    return (
        _changed(known, mesh, results=[None] * (len(known.out_avals) - count) + ways),
        _changed(later, mesh, arguments=[entering.get(i) for i in range(len(later.in_avals))]),
    )


def _ways(known, count: int, mesh: AnyMesh) -> list[_Taken | _Saved]:
    """How each of the last `count` results gets to the later part: as an argument, or as completion has
    it.
    """
    if not count:
        return []
    makers = {eqn.outvars[0]: eqn for eqn in known.jaxpr.eqns if eqn.primitive is annotate_p}
    arguments = {v: i for i, v in enumerate(known.jaxpr.invars)}
    taken = [_taken(v, makers, arguments, mesh) for v in known.jaxpr.outvars[-count:]]
    shardings = program.completed_results(known, mesh)[-count:]
    avals = known.out_avals[-count:]
    return [way or _saved(s, aval, mesh) for way, s, aval in zip(taken, shardings, avals, strict=True)]


def _taken(var, makers, arguments, mesh: AnyMesh) -> _Taken | None:
    """What does not rest as annotated is better saved: to take it would move it once more."""
    annotations = []
    while var in makers and _rests(makers[var], mesh):
        annotations.insert(0, makers[var])
        var = makers[var].invars[0]
    return _Taken(arguments[var], tuple(annotations)) if var in arguments else None


def _rests(eqn, mesh: AnyMesh) -> bool:
    shape = eqn.outvars[0].aval.shape
    return (
        eqn.params["like"] is None and _padded(eqn.params["dims"], shape, eqn.params["mesh"] or mesh) == shape
    )


def _padded(dims: Dims, shape: tuple[int, ...], mesh: AnyMesh) -> tuple[int, ...]:
    return tuple(
        round_up(n, shard_count(axes or (), mesh.shape)) for n, axes in zip(shape, dims, strict=True)
    )


def _saved(sharding: Sharding, aval, mesh: AnyMesh) -> _Saved:
    """A dim that completion does not split stays open. Keys, and what is on the host, cannot be padded."""
    if not sharding.axes:
        return _Saved(None, aval.shape, aval.shape)
    dims = tuple(axes or None for axes in sharding.dims)
    fixed = memory_of(aval) is jax.memory.Space.Host or jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
    return _Saved(dims, aval.shape, aval.shape if fixed else _padded(dims, aval.shape, mesh))


def _changed(jaxpr, mesh: AnyMesh, arguments: Sequence[Any] = (), results: Sequence[Any] = ()):
    """The jaxpr that loads its arguments, stores its results, and leaves out those that need not be; None: as
    it is.
    """
    arguments, results = arguments or [None] * len(jaxpr.in_avals), results or [None] * len(jaxpr.out_avals)
    if not any(arguments) and not any(results):
        return jaxpr

    def changed(*args):
        args = [way.load(x) if way else x for x, way in zip(args, arguments, strict=True)]
        outs = zip(jaxpr_as_fun(jaxpr)(*args), results, strict=True)
        return [way.store(x) if way else x for x, way in outs if not isinstance(way, _Taken)]

    pairs = zip(shapes(jaxpr.in_avals, mesh), arguments, strict=True)
    return jax.make_jaxpr(changed)(
        *(s.update(shape=way.stored) if isinstance(way, _Saved) else s for s, way in pairs)
    )


def shapes(avals, mesh: AnyMesh) -> list[jax.ShapeDtypeStruct]:
    """Each in the memory where it is kept, which only shapes on a mesh can say."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh)):
        return list(map(shape_of, avals))


split = _jax.weakly_cached(NowAndLater)

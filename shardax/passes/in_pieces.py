"""In pieces: what is gathered on the device only to be sent to the host is gathered and sent piece by piece.

    a = all_gather(x)                        for each piece i:
    a_host = send(a[:95])            ->          a_host[i] = send(all_gather(x[i])[:95])

New parameters that rest whole are made so (stages 1 and 2 of ZeRO), each in the place of the old one. The
device then holds a few pieces of what it held whole, with its padding and without. What is gathered along the
only dim that can be cut stays whole (`in_turn`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.graph.evaluate import bound
from shardax.passes.blocks import Block, Blocks, blocks, put, tiled_dims
from shardax.passes.in_turn import sends
from shardax.passes.moves import HOST, WHOLE, is_at_host, nbytes, variables


def in_pieces(jaxpr, tiles: bool = True):
    """The same jaxpr, closed or open, and its bodies, with such arrays in pieces; `tiles` is whether the
    chip's arrays lie so.
    """
    opened = _jax.closed(jaxpr).jaxpr
    eqns = [_jax.with_bodies(eqn, partial(in_pieces, tiles=tiles)) for eqn in opened.eqns]
    old = _predecessors(opened)
    found = [each for each in _gathered(eqns, opened.outvars) if each.send.outvars[0] in old]
    most = sum(nbytes(each.send.outvars[0]) for each in found) // WHOLE
    new = {id(each.send): each.in_pieces(most, old[each.send.outvars[0]], tiles) for each in found}
    gone = {id(eqn) for each in found if new[id(each.send)] for eqn in each.eqns}
    kept = ((eqn, new.get(id(eqn))) for eqn in eqns if new.get(id(eqn)) or id(eqn) not in gone)
    return _jax.replaced_eqns(jaxpr, [each for eqn, pieces in kept for each in pieces or [eqn]])


def _predecessors(jaxpr) -> dict[Any, Any]:
    """By results at the host the arguments at the host in whose place they may be: of as many that are alike
    the one at the same place.
    """
    alike: dict[Any, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for n, atoms in enumerate((jaxpr.invars, dict.fromkeys(variables(jaxpr.outvars)))):
        for v in filter(is_at_host, atoms):
            alike[v.aval.shape, v.aval.dtype][n].append(v)
    pairs = (zip(new, old, strict=True) for old, new in alike.values() if len(old) == len(new))
    return dict(pair for each in pairs for pair in each)


class _Gathered(NamedTuple):
    """Equations that gather an array, cut it and send it, and whose results nothing else reads; `dims` are
    those along which they do.
    """

    eqns: Sequence[Any]
    dims: Collection[int]

    @property
    def send(self) -> Any:
        return self.eqns[-1]

    def in_pieces(self, most: int, old, tiles: bool) -> list[Any]:
        """Equations that do so piece by piece, each of at most so many bytes if they can be, in the place of
        `old`; none where no dim can be cut.
        """
        (source,), (result,) = variables(self.eqns[0].invars), self.send.outvars
        cut = self._cut(result.aval, most, tiles)
        if cut is None:
            return []

        def run(x, whole):
            trip = lambda i, done: self._sent(x, done, cut.number(i))  # noqa: E731
            last = lambda _, done: self._sent(x, done, cut.last(0))  # noqa: E731
            whole = lax.fori_loop(0, cut.count, trip, whole)
            return lax.fori_loop(0, 1, last, whole) if cut.has_last else whole

        return equations_of(run, [source, old], [result], self.send)

    def _cut(self, aval, most: int, tiles: bool) -> Blocks | None:
        """Along the dim of the largest pieces that fit, or else of the smallest there are. Without tiles,
        pieces along the first dim lie together.
        """
        width, shape = aval.dtype.itemsize, aval.shape
        free = sorted({*range(len(shape))} - {*self.dims, *([tiled_dims(shape)[1]] if tiles else [])})
        cuts = (blocks(shape, [width], most, dim, tiles=tiles) for dim in free)
        ways = [each for each in cuts if each is not None]
        fits = [each for each in ways if each.elements * width <= most]
        if not fits:
            return min(ways, key=_elements, default=None)
        return max(fits, key=_elements) if tiles else fits[0]

    def _sent(self, x, whole, piece: Block) -> Any:
        """The whole, with what is made of a piece of an array."""
        dim, size = piece.of.first, piece.of.size
        made = lax.dynamic_slice_in_dim(x, piece.start, size, dim, allow_negative_indices=False)
        for eqn in self.eqns[:-1]:
            (made,) = bound(eqn, [made], **_of_rows(eqn, dim, size))
        return lax.dynamic_update_slice(whole, put(made, HOST), piece.starts, allow_negative_indices=False)


def _elements(of: Blocks) -> int:
    return of.elements


def _of_rows(eqn, dim: int, size: int) -> dict[str, Any]:
    """The parameters of an equation that are others where its operand has that many rows."""
    if eqn.primitive is not lax.slice_p:
        return {}
    limits = list(eqn.params["limit_indices"])
    limits[dim] = size
    return {"limit_indices": tuple(limits)}


def _gathered(eqns: Sequence[Any], results: Sequence[Any]) -> list[_Gathered]:
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    reads = Counter([v for eqn in eqns for v in variables(eqn.invars)] + variables(results))
    found = (_gathered_by(eqn, makers, reads) for eqn in eqns if sends(eqn))
    return [each for each in found if each is not None]


def _gathered_by(send, makers: Mapping[Any, Any], reads: Mapping[Any, int]) -> _Gathered | None:
    """What is sent by an equation, if it is gathered."""
    eqns, dims = [send], set[int]()
    while (eqn := makers.get(eqns[0].invars[0])) is not None and reads[eqn.outvars[0]] == 1:
        own = _dims(eqn)
        if own is None:
            break
        eqns, dims = [eqn, *eqns], dims | own
    return _Gathered(eqns, dims) if any(eqn.primitive is lax.all_gather_p for eqn in eqns) else None


def _dims(eqn) -> set[int] | None:
    """Along which dims an equation gathers or cuts an array, None where it does something else."""
    if eqn.primitive is lax.all_gather_p and eqn.params["tiled"]:
        return {eqn.params["all_gather_dimension"]}
    if eqn.primitive is not lax.slice_p or eqn.params["strides"] is not None:
        return None
    sizes = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    return {dim for dim, (whole, part) in enumerate(sizes) if whole != part}

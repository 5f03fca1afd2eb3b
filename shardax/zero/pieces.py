"""Pieces: a function of weights and arguments as programs that run in turn, with few weights each.

h = embed[tokens]            a piece: embed
scan over w: h = f(h, w)     a piece for each row of w, all of them one compiled program
logits = h @ embed.T         a piece: embed, again
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.graph.evaluate import bound, evaluate

Key = Hashable  # of a value that pieces make or read; arguments are numbered


class Loaded(NamedTuple):
    """A weight, by its number among the leaves; or a row of its first dim."""

    leaf: int
    row: int | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """`run` makes the values `makes` of the weights, in their order, and of the values `reads`. Nothing reads
    `last` later.
    """

    run: Callable[..., Sequence[Any]]
    weights: Sequence[Loaded]
    reads: Sequence[Key]
    makes: Sequence[Key]
    last: Collection[Key] = ()


class Cut(NamedTuple):
    """The pieces, the keys of the results, and their tree."""

    pieces: Sequence[Piece]
    results: Sequence[Key]
    tree: Any


def cut(apply: Callable[..., Any], params: Any, args: Any, most: int) -> Cut:
    """The pieces of `apply(params, *args)`, of about `most` bytes of weights, where more than one is read."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, *args))
    closed, out = jax.make_jaxpr(apply, return_shape=True)(*shapes)
    flat = jax.make_jaxpr(lambda *args: evaluate(closed, args))(*map(shape_of, closed.in_avals))
    cutter = _Cutter(flat := _jax.dce(flat), len(jax.tree.leaves(params)), most)
    groups = cutter.groups()
    for eqns, later in zip(groups, _read_later(groups, flat.jaxpr.outvars), strict=True):
        if cutter.is_loop(eqns[0]):
            cutter.loop(eqns[0], later)
        else:
            cutter.straight(eqns, [v for eqn in eqns for v in eqn.outvars if v in later])
    results = cutter.results()
    return Cut(_with_last(cutter.pieces, results), results, jax.tree.structure(out))


def _read_later(groups: Sequence[Sequence[Any]], results: Sequence[Any]) -> list[set[Any]]:
    """For each group the variables that are read after it."""
    later = [{v for v in results if not _jax.is_literal(v)}]
    for eqns in reversed(groups[1:]):
        later.append(later[-1] | {v for eqn in eqns for v in eqn.invars if not _jax.is_literal(v)})
    return later[::-1]


def _with_last(pieces: Sequence[Piece], results: Sequence[Key]) -> list[Piece]:
    read, found = set(results), []
    for piece in reversed(pieces):
        last = {*piece.reads, *piece.makes} - read
        read |= last
        found.append(replace(piece, last=last))
    return found[::-1]


class _Cutter:
    """Cuts one jaxpr, whose first arguments are the weights. Values are known by their variables."""

    def __init__(self, closed, count: int, most: int):
        self.jaxpr, self.most = closed.jaxpr, most
        self.leaf = {v: i for i, v in enumerate(self.jaxpr.invars[:count])}
        self.keys: dict[Any, Key] = {v: i for i, v in enumerate(self.jaxpr.invars[count:])}
        self.constants = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.pieces: list[Piece] = []
        self.programs: dict[str, Callable[..., Any]] = {}

    def is_loop(self, eqn) -> bool:
        """Whether it goes over the rows of weights."""
        if eqn.primitive.name != "scan":
            return False
        rows = eqn.invars[sum(_jax.scan_counts(eqn.params)) :]
        return any(not _jax.is_literal(v) and v in self.leaf for v in rows)

    def groups(self) -> list[list[Any]]:
        """The equations in turn, those of a loop apart, others cut where they would read too many weights."""
        groups: list[list[Any]] = []
        read: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            new = {v for v in eqn.invars if not _jax.is_literal(v) and v in self.leaf}
            full = bool(read) and bool(new - read) and sum(map(_nbytes, read | new)) > self.most
            if not groups or full or self.is_loop(eqn) or self.is_loop(groups[-1][0]):
                groups.append([])
                read = set()
            groups[-1].append(eqn)
            read |= new
        return groups

    def straight(self, eqns: Sequence[Any], makes: Sequence[Any]) -> None:
        """One piece, of equations of no loop over weights."""
        made = {v for eqn in eqns for v in eqn.outvars}
        atoms = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not _jax.is_literal(v))
        reads = [v for v in (*atoms, *makes) if v not in made and v not in self.constants]
        weights, values = (
            [v for v in dict.fromkeys(reads) if (v in self.leaf) is is_weight] for is_weight in (True, False)
        )

        def run(*args):
            env = dict(zip((*weights, *values), args, strict=True)) | self.constants
            for eqn in eqns:
                read = [v.val if _jax.is_literal(v) else env[v] for v in eqn.invars]
                env.update(zip(eqn.outvars, bound(eqn, read), strict=True))
            return [env[v] for v in makes]

        self.keys.update((v, v) for v in makes)
        loaded = [Loaded(self.leaf[v]) for v in weights]
        read = [self.keys[v] for v in values]
        types = [shape_of(v.aval) for v in (*weights, *values)]
        self.pieces.append(Piece(self._program(jax.make_jaxpr(run)(*types)), loaded, read, list(makes)))

    def _program(self, closed):
        """One compiled program for all pieces that compute the same, as equal layers do."""
        program = jax.jit(jaxpr_as_fun(closed))
        return program if closed.consts else self.programs.setdefault(str(closed), program)

    def loop(self, eqn, later: Collection[Any]) -> None:
        """A piece for each iteration, and one that stacks what they give."""
        consts, carries = _jax.scan_counts(eqn.params)
        length, first = eqn.params["length"], consts + carries
        operands = [self._operand(v, k >= first) for k, v in enumerate(eqn.invars)]
        starts = [self._key(v) for v in eqn.invars[consts:first]]
        fixed = [k for k in range(len(operands)) if not consts <= k < first]
        weights = [k for k in fixed if operands[k][0] in ("row", "weight")]
        values = [k for k in fixed if operands[k][0] == "value"]
        places = [*weights, *values, *range(consts, first)]
        known = {k: x for k, (kind, x) in enumerate(operands) if kind == "known"}
        program, rows = _iteration(eqn, places, known, {k for k in fixed if k >= first} - {*weights}), []
        for n in range(length):
            i = length - 1 - n if eqn.params["reverse"] else n
            loaded = [Loaded(operands[k][1], i if operands[k][0] == "row" else None) for k in weights]
            makes = [(eqn.outvars[k], n) for k in range(len(eqn.outvars))]
            reads = [*(operands[k][1] for k in values), *starts]
            self.pieces.append(Piece(partial(program, i), loaded, reads, makes))
            starts, rows = makes[:carries], [*rows, makes[carries:]]
        self.keys.update(zip(eqn.outvars, starts, strict=False))
        stacked = [(k, v) for k, v in enumerate(eqn.outvars[carries:]) if v in later]
        for k, v in stacked:
            ordered = [row[k] for row in (rows[::-1] if eqn.params["reverse"] else rows)]
            self.pieces.append(Piece(_stacked, (), ordered, [v]))
            self.keys[v] = v

    def _operand(self, atom, is_row: bool) -> tuple[str, Any]:
        """What an operand of a loop is: a weight, or a row of one; a value, by its key; or known."""
        if _jax.is_literal(atom):
            return "known", atom.val
        if atom in self.constants:
            return "known", self.constants[atom]
        if atom in self.leaf:
            return "row" if is_row else "weight", self.leaf[atom]
        return "value", self.keys[atom]

    def _key(self, atom) -> Key:
        """The key of a value that is needed as one, whatever it is."""
        kind, known = self._operand(atom, False)
        if kind == "value":
            return known
        key = object()
        given = [Loaded(known)] if kind == "weight" else []
        run = _same if given else lambda: [jnp.asarray(known)]
        self.pieces.append(Piece(run, given, (), [key]))
        return key

    def results(self) -> list[Key]:
        return [self._key(v) for v in self.jaxpr.outvars]


def _iteration(eqn, places: Sequence[int], known: Mapping[int, Any], stacked: Collection[int]):
    """One iteration of a loop, as a function of its number and of the operands at these places; of what is
    `stacked` it takes its row.
    """
    body = jaxpr_as_fun(_jax.closed(eqn.params["jaxpr"]))

    def run(i, *args):
        given = {**known, **dict(zip(places, args, strict=True))}
        for k in stacked:
            given[k] = lax.dynamic_index_in_dim(given[k], i, keepdims=False)
        return body(*(given[k] for k in range(len(given))))

    return jax.jit(run)


def _nbytes(v) -> int:
    return v.aval.size * v.aval.dtype.itemsize


@jax.jit
def _stacked(*rows):
    return [jnp.stack(rows)]


def _same(x):
    return [x]

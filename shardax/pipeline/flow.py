"""The program of one microbatch of a step, forward and backward: its parts, and which values each reads.

Values have *keys*: variables of the flat jaxpr, and of a scan whose trips lie on several stages
("carry", equation, number, 0, trips that ran) and ("rows", result, number, first row, last row + 1), what a
stretch of its trips stacked.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Literal

from shardax import _jax
from shardax.differentiated import is_transposed
from shardax.graph.evaluate import bound
from shardax.pipeline.cut import AGAIN, BATCH, NEITHER, PARAMS, Lazily, Part, Parts, rows_of, variables
from shardax.pipeline.in_place import adding
from shardax.spmd_rules.equations import is_dear, is_transposition, keeps_order

Rows = tuple[int, int]


class Operand(NamedTuple):
    """What a part reads as operand `number`: the value of `key`, a variable or a carry; of a variable that is
    scanned over these `rows` alone.
    """

    number: int
    key: Any
    rows: Rows | None = None


class Flow(Parts):
    """`parts` are those of the forward pass, `returning` those of the backward pass. The last argument is the
    microbatch's number. What is made of that and of the batch alone, `alone`, is made by each stage that
    reads it, unless that is much to compute. `forward`: all parts are of the forward pass.
    """

    def __init__(self, closed, params: int, batched: int, forward: bool = False, at: Sequence[str] = ()):
        self.alone: set[Any] = set()
        self.forward = forward
        super().__init__(closed, params, batched, at)
        self.returning = [part for part in self.parts if part.number in self.backward]
        self.parts = [part for part in self.parts if part.number not in self.backward]

    def depends_on(self, eqn) -> int:
        """As of a loss, but what is made of the batch and the number alone counts as made of nothing."""
        if not self.alone:
            self.alone = {*self.of_batch, *self.jaxpr.invars[-1:]}
        read = set(variables(eqn.invars))
        if _jax.has_effects(eqn) or self.alone.isdisjoint(read):
            return super().depends_on(eqn)
        is_alone = all(self.kind(v) == NEITHER for v in read - self.alone) and not is_dear(eqn)
        self.alone.update(eqn.outvars if is_alone else ())
        return NEITHER if is_alone else BATCH

    @cached_property
    def backward(self) -> set[int]:
        """The equations of the backward pass: JAX notes on their scope that it transposed them. What depends
        on one is one."""
        found: set[int] = set()
        made: set[Any] = set()
        for number, eqn in enumerate(self.jaxpr.eqns if not self.forward else ()):
            depends = any(v in made for v in variables(eqn.invars))
            if self.is_part(eqn) and (depends or is_transposed(eqn.source_info.name_stack)):
                found.add(number)
                made.update(eqn.outvars)
        return found

    def trips(self, number: int) -> int:
        """As of a loss; of a backward pass over layers also those of a scan over what the trips of the
        forward pass stacked."""
        if number not in self.backward:
            return super().trips(number)
        eqn = self.jaxpr.eqns[number]
        if eqn.primitive.name != "scan":
            return 1
        rows = eqn.invars[sum(_jax.scan_counts(eqn.params)) :]
        over_layers = any(self.kind(v) == PARAMS or self.is_stacked(v) for v in rows)
        return eqn.params["length"] if over_layers else 1

    def is_stacked(self, atom) -> bool:
        """Whether it is what a scan that may lie on several stages stacks."""
        if isinstance(atom, Literal) or atom not in self.maker or self.kind(atom) != BATCH:
            return False
        number = self.maker[atom]
        eqn = self.jaxpr.eqns[number]
        is_cut = eqn.primitive.name == "scan" and self.trips(number) > 1
        return is_cut and eqn.outvars.index(atom) >= _jax.scan_counts(eqn.params)[1]

    # What parts read

    def operands(self, part: Part) -> Iterator[Operand]:
        """Those that depend on the microbatch, but arguments."""
        eqn, n = self.jaxpr.eqns[part.number], part.number
        is_cut = self.trips(n) > 1
        consts, carries = _jax.scan_counts(eqn.params) if is_cut else (len(eqn.invars), 0)
        for i, v in enumerate(eqn.invars):
            if is_cut and consts <= i < consts + carries and part.start:
                yield Operand(i, ("carry", n, i - consts, 0, part.start))
            elif self.kind(v) == BATCH and v in self.maker:
                rows = rows_of(eqn, part.start, part.stop) if i >= consts + carries else None
                yield Operand(i, v, rows)

    def writes(self, part: Part) -> list[Any]:
        eqn, n = self.jaxpr.eqns[part.number], part.number
        if self.trips(n) == 1:
            return list(eqn.outvars)
        _, carries = _jax.scan_counts(eqn.params)
        rows = rows_of(eqn, part.start, part.stop)
        if part.stop < self.trips(n):
            carried = [("carry", n, i, 0, part.stop) for i in range(carries)]
        else:
            carried = list(eqn.outvars[:carries])
        return [*carried, *(("rows", n, i, *rows) for i in range(carries, len(eqn.outvars)))]

    # Where forward parts are cut

    @cached_property
    def _last_read(self) -> dict[Any, int]:
        last = dict.fromkeys(self.maker, -1)
        for number, eqn in enumerate(self.jaxpr.eqns):
            if number not in self.backward:
                last.update(dict.fromkeys(variables(eqn.invars), number))
        return last

    def crossing_keys(self, place: int) -> list[Any]:
        part = self.parts[place]
        before = (v for v, n in self.maker.items() if self.depends[v] == BATCH and n < part.number)
        keys = [v for v in before if v in self._read_from(part) or self._last_read[v] > part.number]
        if part.start:
            written = zip(self.writes(Part(part.number, 0, part.start)), self._outvars(part), strict=True)
            keys += [key for key, v in written if key[0] == "carry" or self._last_read[v] > part.number]
        return keys

    def _outvars(self, part: Part) -> Sequence[Any]:
        return self.jaxpr.eqns[part.number].outvars

    # What depends on parameters alone

    def roots(self, atom) -> list[Any]:
        """Of what stages make a variable that depends on parameters alone: themselves, where elements only
        move, else of it alone, which is made once per step."""
        if self.kind(atom) != PARAMS:
            return []
        eqn = self.jaxpr.eqns[self.maker[atom]] if atom in self.maker else None
        if eqn is not None and (keeps_order(eqn) or is_transposition(eqn)):
            return [root for v in eqn.invars for root in self.roots(v)]
        return [atom]

    def pieces(self, parts: Sequence[Part]) -> list[tuple[Any, Rows | None]]:
        """What these parts read of the parameters: variables, all or rows of them."""
        found: dict[tuple[Any, Rows | None], None] = {}
        for part in parts:
            eqn = self.jaxpr.eqns[part.number]
            for i, v in enumerate(eqn.invars):
                rows = self._rows_read(part, i)
                if self.kind(v) == PARAMS and rows:
                    found[v, rows] = None
                else:
                    found.update(dict.fromkeys((root, None) for root in self.roots(v)))
        return list(found)

    def _rows_read(self, part: Part, operand: int) -> Rows | None:
        eqn = self.jaxpr.eqns[part.number]
        if eqn.primitive.name != "scan" or self.trips(part.number) == 1:
            return None
        if operand < sum(_jax.scan_counts(eqn.params)):
            return None
        return rows_of(eqn, part.start, part.stop)

    def computed_again(self) -> Iterator[tuple[int, set[Any]]]:
        """The equations with which a backward pass computes something again, and what of the parameters that
        reads."""
        for number in sorted(self.backward):
            eqn = self.jaxpr.eqns[number]
            read = {root for v in variables(eqn.invars) for root in self.roots(v)}
            if eqn.primitive.name in AGAIN and read:
                yield number, read

    @cached_property
    def within(self) -> Set[int]:
        """As of a loss: those between the first and the last part that reads what only this checkpoint does.
        The stage that runs it would have the other's weights sent to it in each step."""
        reads: dict[Any, list[int]] = {}
        for place, part in enumerate(self.parts):
            for root, _ in self.pieces([part]):
                reads.setdefault(root, []).append(place)
        again = [read for _, read in self.computed_again()]
        times = Counter(itertools.chain(*again))
        found: set[int] = set()
        for read in again:
            own = [place for root in read if times[root] == 1 for place in reads.get(root, ())]
            found.update(range(min(own) + 1, max(own) + 1) if own else ())
        return found

    # Running them

    def run(
        self,
        parts: Sequence[Part],
        env: dict[Any, Any],
        rows: dict[Any, Any],
        totals: Mapping[Any, Any] | None = None,
    ) -> "Reader":
        """Adds what the parts make to `env`, by keys; `rows` has the pieces that are rows, by variable and
        rows. `totals`: by the keys of what trips stack, sums to which it is added, which it is then."""
        reader = Reader(self, env, rows)
        for part in parts:
            eqn = self.jaxpr.eqns[part.number]
            keys, length = self.writes(part), part.stop - part.start
            if self.trips(part.number) == 1:
                made = bound(eqn, list(map(reader.value, eqn.invars)))
            else:
                operands = [reader.operand(part, i) for i in range(len(eqn.invars))]
                own = {n: totals[key] for n, key in enumerate(keys) if totals and key in totals}
                made = adding(eqn, operands, length, own) if own else bound(eqn, operands, length=length)
            env.update(zip(keys, made, strict=True))
        return reader


class Reader:
    """Reads values by keys of an environment, rows and wholes of what stretches of trips stacked."""

    def __init__(self, flow: Flow, env: dict[Any, Any], rows: dict[Any, Any]):
        self.flow, self.env, self.rows = flow, env, rows
        self.lazily = Lazily(flow, env)

    def value(self, key) -> Any:
        if isinstance(key, tuple):
            return self.env[key]
        return self.stacked(key, None) if self.flow.is_stacked(key) else self.lazily.read(key)

    def operand(self, part: Part, i: int) -> Any:
        """Of a scan whose trips lie on several stages."""
        eqn = self.flow.jaxpr.eqns[part.number]
        consts, carries = _jax.scan_counts(eqn.params)
        v, mine = eqn.invars[i], rows_of(eqn, part.start, part.stop)
        if consts <= i < consts + carries and part.start:
            return self.env["carry", part.number, i - consts, 0, part.start]
        if i < consts + carries:
            return self.value(v)
        if (v, mine) in self.rows:
            return self.rows[v, mine]
        if self.flow.is_stacked(v):
            return self.stacked(v, mine)
        return lax.slice_in_dim(self.value(v), *mine)

    def stacked(self, v, rows: Rows | None) -> Any:
        """These rows, None: all, of what trips stacked, of the stretches that are there."""
        number = self.flow.maker[v]
        place = self.flow.jaxpr.eqns[number].outvars.index(v)
        some = sorted(key for key in self.env if _is_rows(key, number, place))
        if rows is not None:
            some = [key for key in some if key[3] < rows[1] and rows[0] < key[4]]
        start, stop = some[0][3], some[-1][4]
        values = [self.env[key] for key in some]
        whole = values[0] if len(some) == 1 else lax.concatenate(values, 0)
        if rows is None or rows == (start, stop):
            return whole
        return lax.slice_in_dim(whole, rows[0] - start, rows[1] - start)


def _is_rows(key, number: int, place: int) -> bool:
    return isinstance(key, tuple) and key[:3] == ("rows", number, place)

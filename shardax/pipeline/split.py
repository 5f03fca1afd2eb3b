"""What a step does before, for, and after its microbatches.

    before   what is made of the state alone, and sums over the batch of what is made of the batch alone, as
             the number of tokens that are not masked; rows of the batch that change places, as in mixup;
             callbacks that get the state alone, or the whole batch
    for      the forward and the backward pass, up to what is summed over microbatches, or stacked
    after    what is made of sums: the update, metrics, clipping, the scale of the loss

What only moves, casts or adds summands is done behind the sum, once: gradients of several uses of a weight
then meet after all microbatches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, jaxprs_in_params

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.graph.evaluate import bound
from shardax.ledger.collectives import kind_of, reduction_of
from shardax.pipeline.adding import Adding
from shardax.pipeline.cut import variables
from shardax.pipeline.origins import settled
from shardax.pipeline.packed import Packed
from shardax.pipeline.printed import called_back
from shardax.pipeline.region import Made, Region
from shardax.pipeline.repacking import pack_p, unpack_p
from shardax.pipeline.resting import gathered
from shardax.pipeline.virtual import AXIS, JOINS, STACKED, Microbatch, is_sent, joins_all
from shardax.spmd_rules.equations import is_once, linear_in, multiplies

STATE, BATCH, AFTER = range(3)
ROWS = "rows"  # in environments, before a variable: its values, stacked
PACKED = "packed"  # before the id of an equation: of what it makes, what was added up so


@dataclass
class Split:
    """Equations of a step's program of one microbatch, by when they run. `summed`: what is added up over
    microbatches, each with the variable that the sum is; `early`: those that run before; `stacked`: what is
    stacked, [microbatches, ...] each. `batch`: paths of the arguments that are taken as the batch. `name`: of
    the function, `forward`: whether it has no backward pass. For errors: `who` cuts it, and `otherwise`, the
    way out where it is no sum. `at`: of the region. `called`: callbacks that get the last results.
    """

    program: Microbatch
    is_param: Sequence[bool]
    is_batch: Sequence[bool]
    batch: Sequence[str]
    name: str = "the step"
    forward: bool = False
    who: str = "sx.pipeline.Pipeline"
    otherwise: str = "use sx.pipeline.value_and_grad"
    at: tuple[str, ...] = ()
    called: Sequence[Any] = ()
    kind: dict[Any, int] = field(default_factory=dict)
    alone: set[Any] = field(default_factory=set)  # what is made of the batch alone, cheaply
    region: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)
    early: list[Any] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)  # of rows that change places, what has each microbatch's
    sums: dict[Any, None] = field(default_factory=dict)
    rows: dict[Any, None] = field(default_factory=dict)

    def __post_init__(self):
        jaxpr = self.program.jaxpr.jaxpr
        of_batch = zip((*self.program.is_batch, True), (*self.is_batch, True), strict=True)
        for v, (is_split, is_batch) in zip(jaxpr.invars, of_batch, strict=True):
            self.kind[v] = BATCH if is_split else STATE
            if is_batch or v.aval.ndim == 0 or _is_key(v.aval):
                self.alone.add(v)
        self.alone.update(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            self._add(eqn)
        for v, dim in zip(jaxpr.outvars, self.program.results, strict=True):
            if self.kind_of(v) == BATCH:
                assert dim is not None or self.program.is_all, (
                    "parts of results are made of those of the batch"
                )
                (self.sums if dim is None else self.rows)[v] = None
        self._move_behind()

    def _no_sum(self, eqn, does: str) -> str:
        line = _jax.user_line(eqn.source_info) or "an unknown line"
        return (
            f"{self.who}: what {line} computes {does}: {self.name} is no sum over microbatches, as "
            "one with batch norm over the whole batch is none; let it use rows of the batch on their own, "
            "take fewer microbatches, if it uses a few neighbours together, as pairs, or "
            f"{self.otherwise}, if the mean of each microbatch's own loss is meant. Taken as the batch "
            f"are {', '.join(self.batch)}; if some of them are none, say which are by batch_argnames="
        )

    def kind_of(self, atom) -> int:
        return STATE if isinstance(atom, Literal) else self.kind.get(atom, STATE)

    def _add(self, eqn) -> None:
        kinds = {self.kind_of(v) for v in eqn.invars}
        if is_sent(eqn):
            self._add_sent(eqn)
            return
        if {BATCH, AFTER} <= kinds:
            raise ValueError(
                self._no_sum(eqn, "reads what is made of the whole batch beside what is made of a part")
            )
        kind = max(kinds, default=STATE)
        for body in jaxprs_in_params(eqn.params):
            if (inner := _sent_inside(body)) is not None:
                raise ValueError(
                    self._no_sum(inner, f"is done for the whole batch, inside a {eqn.primitive.name}")
                )
        for v in eqn.outvars:
            self.kind[v] = kind
        if all(isinstance(v, Literal) or v in self.alone for v in eqn.invars) and not multiplies(eqn):
            self.alone.update(eqn.outvars)
        # what happens once happens before, be it for the region or for what comes after that
        is_early = kind == STATE and is_once(eqn)
        (self.early if is_early else self.region if kind == BATCH else self.after).append(eqn)

    def _add_sent(self, eqn) -> None:
        is_early, joins = all(v in self.alone for v in variables(eqn.invars)), kind_of(eqn) in JOINS
        if not joins_all(eqn) or not joins and not is_early:
            raise ValueError(self._no_sum(eqn, f"needs rows of other microbatches ({eqn.primitive.name})"))
        if not joins:
            self._add_moved(eqn)
            return
        for v in eqn.outvars:
            self.kind[v] = STATE if is_early else AFTER
            if is_early:
                self.alone.add(v)
        if is_early:
            self.early.append(eqn)
        else:
            self.after.append(eqn)
            (self.sums if _is_summed(eqn) else self.rows).update(dict.fromkeys(variables(eqn.invars)))

    def _add_moved(self, eqn) -> None:
        self.early.append(eqn)
        self.moved += eqn.outvars
        self.alone.update(eqn.outvars)
        self.kind.update(dict.fromkeys(eqn.outvars, BATCH))

    def _move_behind(self) -> None:
        """Moves what comes last before a sum, and is linear, behind it."""
        read = {*self.rows, *(v for eqn in self.early for v in variables(eqn.invars))}
        made = {v for eqn in self.region for v in eqn.outvars}
        kept, moved = [], []
        for eqn in reversed(self.region):
            (v, *others) = eqn.outvars
            if not others and v in self.sums and v not in read and self._is_linear(eqn, made):
                moved.append(eqn)
                del self.sums[v]
                self.sums.update(dict.fromkeys(w for w in variables(eqn.invars) if self.kind[w] == BATCH))
            else:
                kept.append(eqn)
                read.update(variables(eqn.invars))
        self.region = kept[::-1]
        self.after = moved[::-1] + self.after

    def _is_linear(self, eqn, made: set[Any]) -> bool:
        """In what is of the batch and made here, which is no larger than the result; products are left where
        they are.
        """
        batch = {i: v for i, v in enumerate(eqn.invars) if self.kind_of(v) == BATCH}
        if any(v not in made or v.aval.size > eqn.outvars[0].aval.size for v in batch.values()):
            return False
        return frozenset(batch) in linear_in(eqn) and not multiplies(eqn)

    # Running it

    def run(
        self,
        args: Sequence[Array],
        count: int,
        microbatches: Callable[[int, Array], Array],
        pipelined: Callable[..., Made],
    ) -> list[Array]:
        """The step's results.

        Args:
          microbatches: gives the argument of a number, its rows of the batch by microbatches, along the dim
            that the program says.
          pipelined: `pipelined(region, arguments, batch, rest, accumulators)` runs the region; the arguments
            are its parameters, packed ones as a `Packed`.
        """
        jaxpr, env = (
            self.program.jaxpr.jaxpr,
            dict(zip(self.program.jaxpr.jaxpr.constvars, self.program.jaxpr.consts, strict=True)),
        )
        number = jaxpr.invars[-1]
        batch = []
        for i, (v, x) in enumerate(zip(jaxpr.invars[:-1], args, strict=True)):
            if self.kind[v] == BATCH:
                batch.append((v, microbatches(i, x)))
            else:
                env[v] = x
        self._run_early(env, batch, number, count)
        self._run_region(env, batch, pipelined)
        pairs = zip(jaxpr.outvars, self.program.results, strict=True)
        whole = (v for v, dim in pairs if dim is None or self.kind_of(v) != BATCH)
        needed = self._needed(variables(whole), env)
        for eqn in needed:
            stacks = is_sent(eqn) and not _is_summed(eqn)
            operands = [
                v.val if isinstance(v, Literal) else env[(ROWS, v) if stacks else v] for v in eqn.invars
            ]
            if eqn.primitive is pack_p:
                made = gathered(eqn.params["packing"], operands, env.get((PACKED, id(eqn)), {}))
            elif any(x is None for x in operands):  # what is made elsewhere
                made = [None] * len(eqn.outvars)
            else:
                made = self._joined(eqn, operands) if is_sent(eqn) else bound(eqn, operands)
            env.update(zip(eqn.outvars, made, strict=True))
        pairs = zip(jaxpr.outvars, self.program.results, strict=True)
        results = [self._result(env, v, dim, count) for v, dim in pairs]
        return called_back(self.called, results, self.program.results[-1] == STACKED)

    def _result(self, env: dict[Any, Any], v, dim: int | None, count: int) -> Any:
        if dim is None:
            return v.val if isinstance(v, Literal) else env[v]
        if self.kind_of(v) == BATCH:
            x = env[ROWS, v]
        else:
            x = v.val if isinstance(v, Literal) else env[v]
            x = jnp.broadcast_to(x, (count, *jnp.shape(x)))
        return x if dim == STACKED else _unsplit(x, dim, self.program.is_in_order)

    @cached_property
    def _unpacked(self) -> list[Any]:
        """The equations that unpack arguments."""
        invars = set(self.program.jaxpr.jaxpr.invars)
        eqns = self.program.jaxpr.jaxpr.eqns
        return [eqn for eqn in eqns if eqn.primitive is unpack_p and invars.issuperset(eqn.invars)]

    @cached_property
    def adding(self) -> Adding:
        """Where sums are added up."""
        return Adding(self.after, list(self.sums), self.program.jaxpr.jaxpr.outvars)

    def _run_early(self, env: dict[Any, Any], batch: list[Any], number, count: int) -> None:
        """Adds what they make to the environment, rows that have changed places to the batch."""
        for eqn in self.early:
            wanted, names = list(variables(eqn.invars)), [v for v, _ in batch]
            if not is_sent(eqn):
                for e in [*self._needed(wanted, env), eqn]:
                    operands = [v.val if isinstance(v, Literal) else env[v] for v in e.invars]
                    env.update(zip(e.outvars, bound(e, operands), strict=True))
                continue

            def rows(own, i, wanted=wanted, names=names):
                inner = {**env, **dict(zip(names, own, strict=True)), number: i}
                for e in self._needed(wanted, inner):
                    operands = [v.val if isinstance(v, Literal) else inner[v] for v in e.invars]
                    inner.update(zip(e.outvars, bound(e, operands), strict=True))
                return [inner[v] for v in wanted]

            numbers, dims = jnp.arange(count, dtype="int32"), (self.program.batch_dim, 0)
            made = jax.vmap(rows, in_axes=dims)([x for _, x in batch], numbers)
            if eqn.outvars[0] in self.moved:
                batch += zip(eqn.outvars, _moved(eqn, made), strict=True)
            else:
                env.update(zip(eqn.outvars, self._joined(eqn, _rows_joined(eqn, made)), strict=True))

    @cached_property
    def _inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Of the region: parameters, leaves of the batch, the rest."""
        invars = self.program.jaxpr.jaxpr.invars[:-1]
        params = [v for v, is_param in zip(invars, self.is_param, strict=False) if is_param]
        params += [v for eqn in self._unpacked for v in eqn.outvars]
        batch = [*(v for v in invars if self.kind[v] == BATCH), *self.moved]
        others = {*params, *batch}
        return (
            params,
            batch,
            [v for v in (*invars, *(v for e in self.early for v in e.outvars)) if v not in others],
        )

    @cached_property
    def loop(self) -> Region:
        """What is done for each microbatch."""
        params, batch, rest = self._inputs
        inputs = [*params, *batch, *rest, self.program.jaxpr.jaxpr.invars[-1]]
        outputs = [*self.sums, *self.rows]
        constants = dict(zip(self.program.jaxpr.jaxpr.constvars, self.program.jaxpr.consts, strict=True))

        def body(*args):
            inner = {**constants, **dict(zip(inputs, args, strict=True))}
            for e in self._needed(outputs, inner):
                operands = [v.val if isinstance(v, Literal) else inner[v] for v in e.invars]
                inner.update(zip(e.outvars, bound(e, operands), strict=True))
            return [inner[v] for v in outputs]

        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            closed = jax.make_jaxpr(body)(*(shape_of(v.aval) for v in inputs))
            closed = _jax.under_local_mesh(closed)  # bodies too, which are transposed on the mesh of stages
        return Region(closed, len(params), len(batch), len(self.sums), self.name, self.forward, self.at)

    def _run_region(self, env, batch, pipelined: Callable[..., Made]) -> None:
        params, _, rest = self._inputs
        arguments: list[Any] = [env[v] for v in params[: sum(self.is_param)]]
        for eqn in self._unpacked:
            arguments.append(Packed([env[v] for v in eqn.invars], eqn.params["packing"]))
        packed, together = self.adding.packed, self.adding.together
        asked = [accumulator for _, places in packed for accumulator, _ in places.values()]
        asked += [accumulator for _, accumulator, _ in together]
        made = pipelined(self.loop, arguments, [x for _, x in batch], [env[v] for v in rest], asked)
        for v, x in zip(self.sums, made.sums, strict=True):
            env[v] = None if x is None else x.astype(v.aval.dtype)
        env.update(zip(((ROWS, v) for v in self.rows), made.rows, strict=True))
        left = iter(made.accumulators)
        for eqn, places in packed:
            env[PACKED, id(eqn)] = {
                array: jax.vmap(partial(settled, chain, dtype=eqn.outvars[array].aval.dtype))(x)
                for (array, (_, chain)), x in zip(places.items(), left, strict=False)
                if x is not None
            }
        for v, _, chain in together:
            if (x := next(left, None)) is not None:
                env[v] = settled(chain, x, v.aval.dtype)

    def _joined(self, eqn, values: Sequence[Array]) -> list[Array]:
        """What a collective makes of sums, or of what is stacked over microbatches."""
        reduction = reduction_of(eqn)
        if reduction == "sum":
            return [x.astype(v.aval.dtype) for x, v in zip(values, eqn.outvars, strict=True)]
        if reduction:
            return [getattr(x, reduction)(0) for x in values]
        dim, in_order = eqn.params["all_gather_dimension"], self.program.is_in_order
        return [
            _unsplit(x, dim, in_order).reshape(v.aval.shape) for x, v in zip(values, eqn.outvars, strict=True)
        ]

    def _needed(self, wanted: Iterable[Any], known: dict[Any, Any]) -> list[Any]:
        """The equations of which these variables are made, those known excepted, in order."""
        needed, found = {v for v in wanted if v not in known}, []
        for eqn in reversed(self.program.jaxpr.jaxpr.eqns):
            if any(v in needed for v in eqn.outvars):
                found.append(eqn)
                if not (is_sent(eqn) and not _is_summed(eqn)):
                    needed.update(v for v in variables(eqn.invars) if v not in known)
        return found[::-1]


def _is_summed(eqn) -> bool:
    return reduction_of(eqn) == "sum"


def _rows_joined(eqn, values: Sequence[Array]) -> list[Array]:
    return [x.sum(0) for x in values] if _is_summed(eqn) else list(values)


def _moved(eqn, values: Sequence[Array]) -> list[Array]:
    """What a collective that moves rows makes of those of all microbatches, [microbatches, ...] each."""
    if kind_of(eqn) == "ppermute":
        return [_permuted(x, eqn.params["perm"]) for x in values]
    return list(jax.vmap(lambda *rows: bound(eqn, rows), axis_name=AXIS)(*values))


def _permuted(x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    """Zeros where nothing is sent. (`jax.vmap` takes whole permutations alone.)"""
    source_of = {target: source for source, target in pairs}
    rows = [x[source_of[i]] if i in source_of else jnp.zeros_like(x[0]) for i in range(len(x))]
    return jnp.stack(rows)


def _unsplit(x: Array, dim: int, in_order: bool) -> Array:
    """[microbatches, ..., rows, ...] -> [..., batch, ...], in whose dim the rows lie."""
    x = jnp.moveaxis(x, 0, dim if in_order else dim + 1)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _is_key(aval) -> bool:
    """Of an old kind."""
    return aval.dtype == np.uint32 and aval.shape in ((2,), (4,))


def _sent_inside(body) -> Any:
    for eqn in body.eqns:
        found = (
            eqn if is_sent(eqn) else next(filter(None, map(_sent_inside, jaxprs_in_params(eqn.params))), None)
        )
        if found is not None:
            return found
    return None

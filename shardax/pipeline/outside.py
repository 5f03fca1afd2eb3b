"""What runs outside of a pipeline: before its first tick, and backward behind its last.

What stands in front of the layers, as an embedding or convolutions that subsample, would be the first
stage's, in each tick; all others would wait. Outside, each stage does it for a part of the microbatches, as
data parallelism over the axis of stages:

    before    forward, of each microbatch       what the stages read of it, and what its backward pass reads
    stages    the ticks                         the cotangents of what they read
    after     backward, of each microbatch      sums and rows, of the cotangents
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.cost.chips import NOMINAL
from shardax.explain.live import nbytes
from shardax.graph.evaluate import bound
from shardax.options import current
from shardax.pipeline.cut import BATCH, PARAMS, Lazily, inside, variables
from shardax.pipeline.flow import Flow
from shardax.pipeline.gathered import Accumulator
from shardax.pipeline.passes import accumulated
from shardax.pipeline.together import Together, group_size

_SCOPE = "shardax.pipeline.outside"
Env = Mapping[Any, Any]
R = TypeVar("R")


def outside(function: Callable[..., R]) -> Callable[..., R]:
    """The function, of which a pipeline runs no part on its stages: forward before the first tick, backward
    behind the last, each stage for a part of the microbatches. What it reads of the batch is made there as
    well. It is for what stands in front of the layers. It does nothing outside of a pipeline.

    Its weights are needed by all stages then, and what it returns for all microbatches waits on each device.

    A pipelined function raises ValueError where it stands inside a loop, or reads what layers make.

    >>> import jax.numpy as jnp
    >>> jax.grad(outside(jnp.sin))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """

    @functools.wraps(function)
    def run(*args, **kwargs) -> R:
        with jax.named_scope(_SCOPE):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Outside:
    """Of a program of one microbatch: `before` and `after`, the numbers of the equations outside."""

    flow: Flow
    before: frozenset[int]
    after: frozenset[int]

    @staticmethod
    def of(flow: Flow) -> "Outside | None":
        """None: all of the program runs on stages. Raises ValueError as `outside` says."""
        eqns = flow.jaxpr.eqns
        marked = {n for n, eqn in enumerate(eqns) if flow.is_part(eqn) and _is_marked(eqn)}
        _check_loops(eqns)
        if not marked:
            return None
        before, after = marked - flow.backward, marked & flow.backward
        made: set[Any] = set()
        for n, eqn in enumerate(eqns):
            if n in after or not made.isdisjoint(variables(eqn.invars)):
                after.add(n)
                made.update(eqn.outvars)
        for n in range(len(eqns) - 1, -1, -1):
            if n in before:
                read = [v for v in variables(eqns[n].invars) if v in flow.maker and flow.kind(v) == BATCH]
                before.update(flow.maker[v] for v in read)
        found = Outside(flow, frozenset(before), frozenset(after))
        found._check(marked)
        return found

    def _check(self, marked: set[int]) -> None:
        for n in sorted(self.before - marked):
            if n in self.flow.backward or n in self.after or self.flow.trips(n) > 1:
                eqns = self.flow.jaxpr.eqns
                first = min(m for m in marked if m > n)
                raise ValueError(
                    f"sx.pipeline.outside at {_line(eqns[first])} reads what {_line(eqns[n])} computes, "
                    "which runs on the stages; only what stands in front of the layers can run outside of "
                    "the pipeline: leave it out there"
                )

    # The programs

    @cached_property
    def _is_outer(self) -> list[bool]:
        """Of each result, whether it is made outside."""
        outer = self.before | self.after
        maker = self.flow.maker
        return [not isinstance(v, Literal) and maker.get(v) in outer for v in self.flow.jaxpr.outvars]

    def _results(self, outer: bool) -> list[Any]:
        pairs = zip(self.flow.jaxpr.outvars, self._is_outer, strict=True)
        return [v for v, is_outer in pairs if is_outer == outer]

    @cached_property
    def _backward(self) -> tuple[list[Any], list[Any]]:
        """The equations of the last part, and what it reads."""
        return self._needed(self._results(True), self._of(self.after))

    @cached_property
    def leaving(self) -> list[Any]:
        """What the stages make and the last part reads."""
        return [v for v in self._backward[1] if self.flow.kind(v) == BATCH and self._is_staged(v)]

    @cached_property
    def _staged(self) -> tuple[list[Any], list[Any]]:
        outer = self.before | self.after
        return self._needed([*self._results(False), *self.leaving], lambda n: n not in outer)

    @cached_property
    def entering(self) -> list[Any]:
        """What the first part makes and the stages read."""
        return [v for v in self._staged[1] if self.flow.maker.get(v) in self.before]

    @cached_property
    def _kept(self) -> list[Any]:
        """What the first part makes and the last reads."""
        return [v for v in self._backward[1] if self.flow.maker.get(v) in self.before]

    @cached_property
    def _forward(self) -> tuple[list[Any], list[Any]]:
        return self._needed([*self.entering, *self._kept], self._of(self.before))

    def _of(self, numbers: frozenset[int]) -> Callable[[int], bool]:
        """Which equations a part outside runs: its own, and those that depend on nothing."""
        eqns, kind = self.flow.jaxpr.eqns, self.flow.kind
        return lambda n: n in numbers or all(kind(v) not in (BATCH, PARAMS) for v in eqns[n].outvars)

    def _is_staged(self, v) -> bool:
        number = self.flow.maker.get(v)
        return number is not None and number not in self.before | self.after

    def _needed(self, wanted: Sequence[Any], own: Callable[[int], bool]) -> tuple[list[Any], list[Any]]:
        """The equations, of its own, of which a part makes these variables, and what it reads."""
        eqns, needed, found = self.flow.jaxpr.eqns, dict.fromkeys(variables(wanted)), []
        for n in range(len(eqns) - 1, -1, -1):
            if own(n) and any(v in needed for v in eqns[n].outvars):
                found.append(eqns[n])
                needed.update(dict.fromkeys(variables(eqns[n].invars)))
        made = {v for eqn in found for v in eqn.outvars}
        return found[::-1], [v for v in needed if v not in made and v not in self.flow.consts]

    @cached_property
    def batch(self) -> list[Any]:
        """What the stages read of the microbatch."""
        return [v for v in self.flow.of_batch if v in self._staged[1]]

    @cached_property
    def closed(self) -> Any:
        """What the stages run. Of the microbatch it takes `batch` and `entering`; what is `leaving` are its
        last results."""
        flow = self.flow
        inputs = [*flow.of_params, *self.batch, *self.entering, *flow.rest]
        results = [*self._results(False), *self.leaving]

        return self._traced(self._staged[0], inputs, results)

    def waiting(self, stages: int) -> float:
        """Bytes of a microbatch that wait on a stage for a part outside, besides what enters."""
        read = {*self._forward[1], *self._backward[1]}
        own = [*self._kept, *(v for v in self.flow.of_batch if v in read)]
        return sum(map(nbytes, self.leaving)) + sum(map(nbytes, own)) / stages

    def staged_sums(self, sums: int) -> int:
        """Of the first `sums` results, how many the stages make."""
        return sum(not is_outer for is_outer in self._is_outer[:sums])

    def accumulator(self, asked: Accumulator) -> Accumulator | None:
        """With the numbers that its sums have on the stages; None where some of them are made outside."""
        if any(self._is_outer[summand.number] for some in asked.parts for summand in some):
            return None
        parts = (tuple(s._replace(number=self.staged_sums(s.number)) for s in some) for some in asked.parts)
        return replace(asked, parts=tuple(parts))

    def joined(self, staged: Iterable[Any], outer: Iterable[Any], start: int, stop: int) -> list[Any]:
        """The results of these numbers, of those that the stages make and the others."""
        inner, others = iter(staged), iter(outer)
        return [next(others if is_outer else inner) for is_outer in self._is_outer[start:stop]]

    def _evaluated(self, eqns: Sequence[Any], env: Env, wanted: Sequence[Any]) -> list[Any]:
        env = {**self.flow.consts, **env}

        def read(v):
            return v.val if isinstance(v, Literal) else env[v]

        for eqn in eqns:
            env.update(zip(eqn.outvars, bound(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, wanted))

    # Running it

    def run(
        self,
        sums: int,
        params: Sequence[Array],
        batch: Sequence[Array],
        rest: Sequence[Array],
        on_stages: Callable[[list[Array]], Sequence[Array | None]],
        count: int,
        place: tuple[str, int],
    ) -> tuple[list[Array], list[Array]]:
        """The sums and the rows that are made outside, of the first `sums` results and the others.

        Args:
          batch: [microbatches, ...] each. `rest`: the other arguments, but the number.
          on_stages: gives, of `batch` and `entering`, what is `leaving`, [microbatches, ...] each.
          count: of microbatches. (Of a batch that they do not divide none is in `batch`, but all in `rest`.)
          place: the axis of stages, and its size.
        """
        flow = self.flow
        of_rows = dict(zip(flow.of_batch, batch, strict=True))
        whole = dict(zip((*flow.of_params, *flow.rest), (*params, *rest), strict=False))
        made = [*self.entering, *self._kept]
        _, rows = self._in_parts(self._forward, made, 0, of_rows, whole, count, place)
        of_rows |= dict(zip(made, rows, strict=True))
        leaving = on_stages([of_rows[v] for v in (*self.batch, *self.entering)])
        of_rows |= dict(zip(self.leaving, leaving, strict=True))
        first = sum(self._is_outer[:sums])
        return self._in_parts(self._backward, self._results(True), first, of_rows, whole, count, place)

    def _in_parts(
        self,
        program: tuple[list[Any], list[Any]],
        wanted: Sequence[Any],
        sums: int,
        of_rows: Env,
        whole: Env,
        count: int,
        place: tuple[str, int],
    ) -> tuple[list[Array], list[Array]]:
        """What a part outside makes of all microbatches, each stage of its own: the first `sums` of what is
        wanted, added up, and the others as rows."""
        (eqns, read), (axis, stages) = program, place
        padded = -(-count // stages) * stages
        rows = [v for v in read if v in of_rows]
        number = self.flow.rest[-1]
        hoisted = Lazily(self.flow, dict(whole))
        others = [v for v in read if v not in of_rows and v is not number]
        memory = _memory(stages)

        def of_group(fixed, total, own):
            same = {**self.flow.consts, **dict(zip(others, fixed, strict=True))}
            counts = None if padded == count else own[0] < count
            together = Together(eqns, same, dict(zip((number, *rows), own, strict=True)), counts)
            added, made = together.run(wanted, sums)
            return [t + x for t, x in zip(total, added, strict=True)], made

        def local(fixed, own):
            one = self._traced(eqns, (*others, number, *rows), wanted)
            group = group_size(one, padded // stages, memory)
            zeros = [jnp.zeros(v.aval.shape, accumulated(v.aval)) for v in wanted[:sums]]
            own = [x.reshape(-1, group, *x.shape[1:]) for x in own]
            total, made = lax.scan(functools.partial(of_group, fixed), zeros, own)
            return [x[None] for x in total], [x.reshape(-1, *x.shape[2:]) for x in made]

        split, same = PartitionSpec(axis), PartitionSpec()
        island = jax.shard_map(
            local, in_specs=(same, split), out_specs=split, axis_names={axis}, check_vma=False
        )
        numbers = jnp.arange(padded, dtype="int32")
        own = [_padded(of_rows[v], padded) for v in rows]
        total, made = island([hoisted.read(v) for v in others], [numbers, *own])
        return [x.sum(0) for x in total], [x[:count] for x in made]

    def _traced(self, eqns: Sequence[Any], read: Sequence[Any], wanted: Sequence[Any]) -> Any:
        """The jaxpr of equations, of what they read."""

        def run(*args):
            return self._evaluated(eqns, dict(zip(read, args, strict=True)), wanted)

        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return jax.make_jaxpr(run)(*(shape_of(v.aval) for v in read))


def _memory(stages: int) -> float:
    """Bytes, of the devices of one stage together."""
    mesh = _jax.context_mesh()
    devices = stages if mesh is None else math.prod(mesh.shape.values())
    return (current().priced_for or NOMINAL).memory * devices / stages


def _padded(x: Array, count: int) -> Array:
    """With its last row again, up to so many."""
    missing = count - len(x)
    return jnp.concatenate([x, jnp.repeat(x[-1:], missing, 0)]) if missing else x


def _is_marked(eqn) -> bool:
    return _SCOPE in str(eqn.source_info.name_stack)


def _check_loops(eqns: Sequence[Any]) -> None:
    for eqn in eqns:
        for inner in () if _is_marked(eqn) else inside(eqn):
            if _is_marked(inner):
                raise ValueError(
                    f"sx.pipeline.outside at {_line(inner)} stands inside a {eqn.primitive.name}, no part of "
                    "which can run outside of the pipeline alone; call it before the loop"
                )


def _line(eqn) -> str:
    return _jax.user_line(eqn.source_info) or "an unknown line"

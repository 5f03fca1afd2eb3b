"""A call of a sharded function, traced: its partitioned program, its plan, and how its arguments and results
rest.
"""

import itertools
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax import _jax, strict
from shardax.annotations.explicit import memory_of
from shardax.explain.placed import AtRest, Placed
from shardax.explain.plan import Plan
from shardax.jit import resting
from shardax.jit.function import Function, crossing_of
from shardax.meshes import sites
from shardax.meshes.crossing import Crossing, program_placement
from shardax.meshes.refinement import Placement
from shardax.options import Options
from shardax.program import Program
from shardax.transform import primitive
from shardax.transforms import Reporting


@dataclass(frozen=True, eq=False)
class Call:
    """`leaves` are those of the arguments, on the program's mesh but for those that `entering` brings there
    before the call.
    """

    function: Function
    traced: jax.stages.Traced
    mesh: Mesh | AbstractMesh
    leaves: Sequence[Any]
    entering: Sequence[Crossing] = ()

    @cached_property
    def eqn(self):
        """The equation of the traced function that carries its global jaxpr."""
        return next(eqn for eqn in self.traced.jaxpr.eqns if eqn.primitive is primitive.shard_jit_p)

    @property
    def jaxpr(self):
        return self.eqn.params["jaxpr"]

    @property
    def count(self) -> int:
        """The number of results; what Refs hold in the end comes after them."""
        return len(jax.tree.leaves(self.traced.out_info))

    @cached_property
    def closed_over(self) -> tuple[Any, ...]:
        """The arrays that the function closes over, what its Refs hold first."""
        return _jax.constant_values(self.traced.jaxpr, self.eqn.invars[len(self.leaves) :])

    @property
    def closed_refs(self) -> range:
        """The numbers of the inputs that are Refs which the function closes over."""
        of_arguments = sum(map(_jax.is_ref, self.leaves))
        first = len(self.leaves)
        return range(first, first + len(self.jaxpr.out_avals) - self.count - of_arguments)

    @property
    def options(self) -> Options:
        return self.eqn.params["options"]

    @property
    def other_meshes(self):
        """The meshes besides the program's that the function names."""
        return sites.others(self.jaxpr, self.eqn.params["mesh"])

    def built(self, options: Options | None = None) -> Program:
        """The partitioned program for these arguments, some of which may be committed to a sharding."""
        committed: list[Placement | None] = []
        for i, x in enumerate(self.leaves):
            crossing = crossing_of(i, x, self.mesh) if isinstance(self.mesh, Mesh) else None
            committed.append(
                program_placement(crossing, len(x.shape)) if crossing else primitive.committed(x, self.mesh)
            )
        committed += [primitive.committed(x, self.mesh) for x in self.closed_over[: len(self.closed_refs)]]
        constants = [None] * (len(self.jaxpr.in_avals) - len(committed))
        return primitive.build(self.jaxpr, (*committed, *constants), self.mesh, options or self.options)

    def check_entering(self, options: Options) -> None:
        """Strict mode refuses what arguments send to come from another mesh, unless the program itself names
        that mesh.
        """
        if self.entering and options.strict:
            named = self.other_meshes
            unrequested = [c for c in self.entering if c.resting.mesh not in named]
            strict.check([x for c in unrequested for x in c.collectives(self.eqn.params["mesh"])], options)

    def arguments(self) -> list[NamedSharding]:
        """The sharding in which the program takes each argument."""
        return [
            _kept(p.on(self.mesh), aval)
            for p, aval in zip(self.built().arguments, self.jaxpr.in_avals[: len(self.leaves)], strict=False)
        ]

    def placed(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of all arguments, and those of all results when each argument comes in its own."""
        count = len(self.leaves)
        arguments, constants = self.built().arguments[:count], [None] * (len(self.eqn.invars) - count)
        results = primitive.build(self.jaxpr, (*arguments, *constants), self.mesh, self.options).left(
            self.mesh
        )
        pairs = list(zip(results, self.jaxpr.out_avals, strict=True))
        return self.arguments(), [_kept(sharding, aval) for sharding, aval in pairs[: self.count]]

    def plan(self, argument_names: tuple[str, ...], phases: dict[str, float], options: Options) -> Plan:
        """The plan. `argument_names`: of positional arguments. `phases`: the seconds that tracing took."""
        self.check_entering(options)
        built = self.built(options)
        args, kwargs = jax.tree.structure(self.traced.args_info).unflatten(self._rests(built))
        outs = jax.tree.structure(self.traced.out_info).unflatten(
            [
                _kept(p.on(self.mesh), aval)
                for p, aval in zip(built.results[: self.count], self.jaxpr.out_avals, strict=False)
            ]
        )
        donated = (i for i, info in enumerate(jax.tree.leaves(self.traced.args_info)) if info.donated)
        plan = Plan(
            self.mesh,
            self.jaxpr,
            built.jaxpr,
            args,
            outs,
            kwargs,
            graph=built.graph,
            values=built.completion,
            decisions=built.decisions,
            phases=ChainMap(built.phases, phases),  # lowering and compiling add to it
            argument_names=argument_names,
            donated=frozenset(donated),
            closed_over=self.closed_over,
            refinement=built.refinement,
            crossings=(*self.entering, *built.entering, *built.leaving),
            program=self.function.place,
            line=self.function.line,
            untyped=self.function.refused.get(self.jaxpr, ""),
            refs=(*(i for i, x in enumerate(self.leaves) if _jax.is_ref(x)), *self.closed_refs),
            reports=tuple(t.report for t in self.function.transforms if isinstance(t, Reporting)),
        )
        elsewhere = (
            _elsewhere("argument", plan.arguments(), resting.arguments(built)),
            _elsewhere("result", plan.results(), resting.results(built)),
        )
        return replace(plan, at_rest=tuple(itertools.chain(*elsewhere)))

    def _rests(self, built: Program) -> list[NamedSharding]:
        """The sharding of each argument between calls; what enters from another mesh stays there."""
        outside = {c.number for c in self.entering}
        slots = enumerate(zip(self.leaves, built.arguments, self.jaxpr.in_avals, strict=False))
        return [x.sharding if i in outside else _kept(p.on(self.mesh), aval) for i, (x, p, aval) in slots]


def _kept(sharding: NamedSharding, aval) -> NamedSharding:
    """The sharding, in the memory where the value is kept."""
    return sharding.with_memory_kind("pinned_host") if memory_of(aval) is jax.memory.Space.Host else sharding


def _elsewhere(side: str, places: Iterable[Placed], entries: Iterable[resting.Elsewhere]) -> Iterator[AtRest]:
    """The arguments or results that rest elsewhere than wanted.

    Nothing moves where what is wanted is the same place in the axes of another mesh. What the function closes
    over comes after the arguments, and is none.
    """
    places = list(places)
    for x in entries:
        if x.number < len(places) and x.wanted.sharding != places[x.number].sharding.settled:
            yield AtRest.of(side, places[x.number], x.wanted.sharding, x.came, x.left)

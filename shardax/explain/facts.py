"""Facts: what is known of a planned program, and what that adds up to. All that a plan shows is read off
them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.annotate import describe
from shardax.cost.chips import CHIPS, Chip
from shardax.cost.network import Message, Network, network_of, network_of_mesh
from shardax.explain.placed import AtRest, Placed, placed
from shardax.explain.roofline import Estimate, Work, estimate, work
from shardax.explain.tables import Table
from shardax.graph.graph import Value
from shardax.ledger.collectives import Collective, collectives, comm_bytes
from shardax.meshes.crossing import Crossing
from shardax.meshes.refinement import Refinement
from shardax.sharding import AxisSizes, Sharding
from shardax.validation import require


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a planned program, and what that adds up to.

    Args:
      mesh: the mesh, abstract or not.
      global_jaxpr: the program that was given, a ClosedJaxpr; its inputs are the leaves of `in_shardings` and
        `kw_shardings`, then what the function closes over.
      local_jaxpr: the program that each device runs, a ClosedJaxpr of one `shard_map` equation.
      in_shardings: the tuple of the arguments, with a NamedSharding for each array: how it is laid out
        between calls.
      out_shardings: likewise the result.
      kw_shardings: likewise the keyword arguments.
      at_rest: what is stored in another sharding than was requested.
      graph: the global program, flat.
      values: the sharding of each value of `graph`, and where it comes from.
      decisions: in which layouts each value of `graph` is made and read.
      phases: seconds that each phase of planning took.
      argument_names: of the positional arguments, in the function's signature.
      donated: the numbers of the donated arguments, as leaves.
      closed_over: the arrays that the function closes over, which are the last inputs of the programs.
      program: the function's name and place, as in "train_step at models/steps.py:34".
      line: its line; collectives that serve no line inside, such as those for `in_shardings`, serve this one.
      refinement: how the axes of the local program make up those of the meshes that the user named.
      crossings: the arguments and results that rest on meshes which do not fit the program's.
      untyped: on a mesh of Explicit axes, why JAX gave the program no types, and where; "" if it did.
      refs: the numbers of the arguments that are Refs, as leaves, and of Refs closed over, which follow. What
        they hold is an input, and in the end a result.
      reports: what else the plan shows, each a function from the plan to a table.
      collectives: read off the crossings and `local_jaxpr` unless given.
    """

    mesh: Any
    global_jaxpr: Any
    local_jaxpr: Any
    in_shardings: tuple[Any, ...]
    out_shardings: Any
    kw_shardings: Mapping[str, Any] = field(default_factory=dict)
    at_rest: tuple[AtRest, ...] = ()
    graph: Any = None
    values: Any = None
    decisions: Any = None
    phases: Mapping[str, float] = field(default_factory=dict)
    argument_names: tuple[str, ...] = ()
    donated: frozenset[int] = frozenset()
    closed_over: tuple[Any, ...] = ()
    program: str = ""
    line: str = ""
    refinement: Refinement | None = None
    crossings: tuple[Crossing, ...] = ()
    untyped: str = ""
    refs: tuple[int, ...] = ()
    reports: tuple[Callable[["Facts"], Table], ...] = ()
    collectives: tuple[Collective, ...] = None  # type: ignore[assignment]

    def __post_init__(self):
        if self.collectives is None:
            folded = self.refinement.folded if self.refinement else tuple
            sent = (
                *self.crossed("argument"),
                *collectives(self.local_jaxpr, self._sizes, folded, self.line),
                *self.crossed("result"),
            )
            object.__setattr__(self, "collectives", sent)

    def crossed(self, side: str) -> Iterator[Collective]:
        """What the crossings of arguments, or results, send, before and after the local program."""
        crossings = [c for c in self.crossings if c.side == side]
        paths = (
            [p.named or p.path for p in (self.arguments() if side == "argument" else self.results())]
            if crossings
            else []
        )
        return (
            replace(entry, line=self.line)
            for c in crossings
            for entry in c.collectives(self.mesh, paths[c.number])
        )

    @property
    def comm_bytes(self) -> int:
        """Bytes that one device sends per call. A scan counts all iterations, a `while` one, a `cond` its
        dearest branch.
        """
        return comm_bytes(self.collectives)

    @_jax.boundary
    def cost_at_rest(self, entry: AtRest) -> int:
        """Bytes that one device sends per call to bring `entry` to the requested sharding, and back to how it
        is stored.
        """
        require(isinstance(entry, AtRest), "entry of Plan.cost_at_rest", entry, "one of Plan.at_rest")
        return entry.came + entry.left

    def arguments(self) -> Iterator[Placed]:
        shardings = (self.in_shardings, dict(self.kw_shardings))
        places = placed(shardings, self.global_jaxpr.in_avals[: len(jax.tree.leaves(shardings))], first=1)
        return (replace(place, named=self._named(place.path)) for place in self._on("argument", places))

    def _on(self, side: str, places: Iterable[Placed]) -> Iterator[Placed]:
        orders = {c.number: str(c.resting.mesh) for c in self.crossings if c.side == side and c.outside}
        for i, place in enumerate(places):
            on = "" if place.on == f"({describe(self.mesh)})" else place.on
            yield replace(place, on=orders.get(i, on))

    def _named(self, path: str) -> str:
        """ "0/params/w" -> "state/params/w", by the signature."""
        first, slash, rest = path.partition("/")
        known = first.isdecimal() and int(first) < len(self.argument_names)
        return (self.argument_names[int(first)] if known else first) + slash + rest

    def results(self) -> Iterator[Placed]:
        """The results, then the Refs among the arguments, which rest as they did."""
        own = len(self.global_jaxpr.out_avals) - len(self.refs)
        yield from self._on("result", placed(self.out_shardings, self.global_jaxpr.out_avals[:own]))
        arguments = list(self.arguments()) if self.refs else []
        of_call = [i for i in self.refs if i < len(arguments)]
        yield from (replace(arguments[i], path=arguments[i].named) for i in of_call)

    @_jax.boundary
    def sharding(self, value) -> Sharding:
        """The sharding of a value of `graph`, as a person reads it."""
        require(isinstance(value, Value), "value of Plan.sharding", value, "a value of Plan.graph")
        sharding = self.values.sharding(value)
        return self.refinement.shown(sharding) if self.refinement else sharding

    @_jax.boundary
    def estimate(self, chip: Chip | str) -> Estimate:
        """Seconds of a call on this chip, by roofline: see `shardax.explain.roofline`.

        Args:
          chip: one of `shardax.cost.chips`, or its name: "v3", "v4", "v5e", "v5p", "v6e", "H100",
            "H200".

        Raises ValueError where there is no such chip.
        """
        require(
            isinstance(chip, str | Chip),
            "chip of Plan.estimate",
            chip,
            f"one of {', '.join(CHIPS)}, or a Chip of your own",
        )
        if isinstance(chip, str) and chip not in CHIPS:
            raise ValueError(
                f"estimate({chip!r}): there is no such chip; give one of {', '.join(CHIPS)}, or a Chip of "
                "your own"
            )
        chip = CHIPS[chip] if isinstance(chip, str) else chip
        own = network_of(self._sizes)
        return estimate(
            self._work, self._sent, own if own.chip == chip else network_of_mesh(self.mesh, chip, own)
        )

    @property
    def network(self) -> Network:
        """The axes of the local program, and the prices for which it was made."""
        return network_of(self._sizes)

    @property
    def _sizes(self) -> AxisSizes:
        return self.refinement.sizes if self.refinement else self.mesh.shape

    @functools.cached_property
    def _sent(self) -> list[tuple[int, Message]]:
        """How often each message is sent, along the axes of the local program, and by crossings along those
        of the mesh.
        """
        crossed = [
            (c.jaxpr(self.mesh), {**self.mesh.shape, **self._sizes}) for c in self.crossings if c.sends
        ]
        programs = [(self.local_jaxpr, self._sizes), *crossed]
        ledger = [c for program, sizes in programs for c in collectives(program, sizes) if not c.other_branch]
        return [(c.trips, c.message) for c in ledger]

    @functools.cached_property
    def _work(self) -> list[Work]:
        crossed = (w for c in self.crossings if c.sends for w in work(c.jaxpr(self.mesh)))
        return [*work(self.local_jaxpr), *crossed]

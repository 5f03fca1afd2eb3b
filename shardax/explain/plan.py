"""Plan: what shardax made of a function, for people to read and for tests to assert on."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from shardax import _jax
from shardax.annotate import describe
from shardax.cost.chips import CHIPS, Chip
from shardax.cost.network import network_of, network_of_mesh
from shardax.cost.roofline import Estimate, Sent, Work, estimate, work
from shardax.crossing import Crossing
from shardax.explain.because import Because
from shardax.explain.html import html_text
from shardax.explain.json import json_text
from shardax.explain.ledger import Collective, collectives, comm_bytes
from shardax.explain.memory import Memory, memory
from shardax.explain.record import changes, check_same_program, read, record
from shardax.explain.source import source
from shardax.explain.tables import WIDTH, plain
from shardax.explain.terminal import shown
from shardax.explain.text import tables
from shardax.explain.values import shardings_text, why
from shardax.explain.words import spec_text
from shardax.given import is_number, is_whole, require
from shardax.graph import Value
from shardax.refinement import Refinement
from shardax.sharding import AxisSizes, Sharding, from_spec, shard_count


@dataclass(frozen=True)
class AtRest:
    """An argument or result that rests in another sharding than was wanted, because the wanted one does not divide it.

    `path` begins with "argument" or "result", as in "argument state/params/embed". `came` is the bytes that one device sends
    per call to bring an argument to the wanted sharding; `left`, to bring a result, or the successor of a donated argument,
    to rest.
    """

    path: str
    shape: tuple[int, ...]
    wanted: Sharding
    rests: Sharding
    came: int = 0
    left: int = 0

    @staticmethod
    def of(side: str, place: "Placed", wanted: Sharding, came: int = 0, left: int = 0) -> "AtRest":
        """A place, of `side` "argument" or "result", that does not rest as wanted."""
        path = f"{side} {place.named or place.path}".rstrip()
        return AtRest(path, tuple(place.aval.shape), wanted, place.sharding, came, left)


@dataclass(frozen=True, eq=False)
class Plan:
    """What runs on each device, what it sends and why. `print(plan)` shows all of it.

    Args:
      mesh: the mesh, abstract or not.
      global_jaxpr: the program that was given, a ClosedJaxpr; its inputs are the leaves of `in_shardings` and `kw_shardings`,
        then what the function closes over.
      local_jaxpr: the program that each device runs, a ClosedJaxpr of one `shard_map` equation.
      in_shardings: the tuple of the arguments, with a NamedSharding for each array: how it lies between calls.
      out_shardings: likewise the result.
      kw_shardings: likewise the keyword arguments.
      at_rest: what rests in another sharding than was wanted.
      graph: the global program, flat.
      values: the sharding of each value of `graph`, and where it comes from.
      decisions: in which layouts each value of `graph` is made and read.
      phases: seconds that each phase of planning took.
      names: of the positional arguments, in the function's signature.
      donated: the numbers of the donated arguments, as leaves.
      closed_over: the arrays that the function closes over, which are the last inputs of the programs.
      program: the function's name and place, as in "train_step at models/steps.py:34".
      line: its line; collectives that serve no line inside, such as those for `in_shardings`, serve this one.
      refinement: how the axes of the local program make up those of the meshes that the user named.
      crossings: the arguments and results that rest on meshes which do not fit the program's.
      refs: the numbers of the arguments that are Refs, as leaves. What they hold is an input, and in the end a result.
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
    names: tuple[str, ...] = ()
    donated: frozenset[int] = frozenset()
    closed_over: tuple[Any, ...] = ()
    program: str = ""
    line: str = ""
    refinement: Refinement | None = None
    crossings: tuple[Crossing, ...] = ()
    refs: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = None  # type: ignore[assignment]

    def __post_init__(self):
        if self.collectives is None:
            folded = self.refinement.folded if self.refinement else tuple
            found = (
                *self.crossed("argument"),
                *collectives(self.local_jaxpr, self._sizes, folded, self.line),
                *self.crossed("result"),
            )
            object.__setattr__(self, "collectives", found)

    def crossed(self, side: str) -> Iterator[Collective]:
        """What the crossings of arguments, or results, send, before and after the local program."""
        found = [c for c in self.crossings if c.side == side]
        names = [p.named or p.path for p in (self.arguments() if side == "argument" else self.results())] if found else []
        return (replace(entry, line=self.line) for c in found for entry in c.collectives(self.mesh, names[c.number]))

    @property
    def comm_bytes(self) -> int:
        """Bytes that one device sends per call. A scan counts all its trips, a `while` one, a `cond` its dearest branch."""
        return comm_bytes(self.collectives)

    @_jax.boundary
    def cost_at_rest(self, moved: AtRest) -> int:
        """Bytes that one device sends per call to bring `moved` to the wanted sharding, and back to where it rests."""
        require(isinstance(moved, AtRest), "moved of Plan.cost_at_rest", moved, "one of Plan.at_rest")
        return moved.came + moved.left

    def arguments(self) -> Iterator["Placed"]:
        shardings = (self.in_shardings, dict(self.kw_shardings))
        places = placed(shardings, self.global_jaxpr.in_avals[: len(jax.tree.leaves(shardings))], first=1)
        return (replace(place, named=self._named(place.path)) for place in self._on("argument", places))

    def _on(self, side: str, places: Iterable["Placed"]) -> Iterator["Placed"]:
        orders = {c.number: str(c.there.mesh) for c in self.crossings if c.side == side and c.outside}
        for i, place in enumerate(places):
            on = "" if place.on == f"({describe(self.mesh)})" else place.on
            yield replace(place, on=orders.get(i, on))

    def _named(self, path: str) -> str:
        """ "0/params/w" -> "state/params/w", by the signature."""
        first, slash, rest = path.partition("/")
        known = first.isdecimal() and int(first) < len(self.names)
        return (self.names[int(first)] if known else first) + slash + rest

    def results(self) -> Iterator["Placed"]:
        """The results, then the Refs among the arguments, which rest as they did."""
        own = len(self.global_jaxpr.out_avals) - len(self.refs)
        yield from self._on("result", placed(self.out_shardings, self.global_jaxpr.out_avals[:own]))
        arguments = list(self.arguments()) if self.refs else []
        yield from (replace(arguments[i], path=arguments[i].named) for i in self.refs)

    @_jax.boundary
    def sharding(self, value) -> Sharding:
        """The sharding of a value of `graph`, as a person reads it."""
        require(isinstance(value, Value), "value of Plan.sharding", value, "a value of Plan.graph")
        sharding = self.values.sharding(value)
        return self.refinement.shown(sharding) if self.refinement else sharding

    @_jax.boundary
    def estimate(self, chip: Chip | str) -> Estimate:
        """Seconds of a call on this chip, by roofline: see `shardax.cost.roofline`.

        Args:
          chip: one of `shardax.cost.chips`, or its name: "v3", "v4", "v5e", "v5p", "v6e", "H200".

        Raises ValueError where there is no such chip.
        """
        require(
            isinstance(chip, str | Chip), "chip of Plan.estimate", chip, f"one of {', '.join(CHIPS)}, or a Chip of your own"
        )
        if isinstance(chip, str) and chip not in CHIPS:
            raise ValueError(
                f"estimate({chip!r}): there is no such chip; give one of {', '.join(CHIPS)}, or a Chip of your own"
            )
        chip = CHIPS[chip] if isinstance(chip, str) else chip
        own = network_of(self._sizes)
        return estimate(self._work, self._sent, own if own.chip == chip else network_of_mesh(self.mesh, chip, own))

    @property
    def _sizes(self) -> AxisSizes:
        return self.refinement.sizes if self.refinement else self.mesh.shape

    @functools.cached_property
    def _sent(self) -> list[Sent]:
        """What is sent, along the axes of the local program, and by crossings along those of the mesh."""
        crossed = [(c.jaxpr(self.mesh), {**self.mesh.shape, **self._sizes}) for c in self.crossings if c.sends]
        programs = [(self.local_jaxpr, self._sizes), *crossed]
        found = [c for program, sizes in programs for c in collectives(program, sizes) if not c.other_branch]
        return [Sent(c.kind, c.axes, c.nbytes, c.minor, c.trips) for c in found]

    @functools.cached_property
    def _work(self) -> list[Work]:
        crossed = (w for c in self.crossings if c.sends for w in work(c.jaxpr(self.mesh)))
        return [*work(self.local_jaxpr), *crossed]

    @_jax.boundary
    def because(self, collective: Collective) -> str:
        """The facts behind one of `collectives`: which two shardings clashed and where each came from, which dims are summed.

        "" where nothing more is known than its `reason`.
        """
        require(isinstance(collective, Collective), "collective of Plan.because", collective, "one of Plan.collectives")
        return self._because.of(collective) if self._because else ""

    @functools.cached_property
    def _because(self) -> Because | None:
        return Because(self) if self.graph else None

    def shardings(self) -> str:
        """A table of what each line of the user's code makes, and of its sharding."""
        return shardings_text(self)

    @_jax.boundary
    def memory(self, threshold: int = 1 << 20) -> Memory:
        """Bytes on each device: arguments by kind, the peak and the arrays that live then, and what is replicated.

        Replicated arrays are listed from `threshold` bytes on. `shardax.explain.memory` says how the peak is computed.
        """
        require(is_number(threshold, 0), "threshold of Plan.memory", threshold, "a number of bytes, such as 1 << 20")
        return memory(self, threshold)

    @_jax.boundary
    def why(self, what: str) -> str:
        """The chain of facts that led to a sharding, in words.

        Args:
          what: the path of an argument ("state/params/w" or "0/params/w"), a line ("model.py:12"), or the name of a variable
            that a line of the program assigns, or of a `checkpoint_name`.

        Raises ValueError where nothing is called so.
        """
        wanted = "the path of an argument ('state/params/w'), a line ('model.py:12'), or the name of a variable"
        require(isinstance(what, str), "what of Plan.why", what, wanted)
        return why(self, what)

    @_jax.boundary
    def diff(self, other: "Plan | str | os.PathLike") -> str:
        """The differences in what this plan and `other` send, and in how arguments and results rest; "" where there are none.

        Lines with - are in this plan alone, those with + in the other. Lines of the user's code count by their file only.

        Args:
          other: a plan, or the file of one that `to_json` or `shardax.testing.assert_plan` wrote.

        Raises ValueError where the file is no plan, or one of another program or other arguments.
        """
        require(
            isinstance(other, Plan | str | os.PathLike), "other of Plan.diff", other, "a plan, or the path of the file of one"
        )
        now = record(self)
        if isinstance(other, Plan):
            return "\n".join(changes(now, record(other)))
        other = Path(other)
        found = read(other)
        check_same_program(found, now, str(other), "Compare plans of one program, or give the plan itself")
        return "\n".join(changes(now, found))

    def to_json(self) -> str:
        """All that the plan says, for other programs to read."""
        return json_text(self)

    @_jax.boundary
    def to_html(self, path: str | os.PathLike) -> None:
        """Writes one HTML file that needs no network: the program, what each line costs, sortable ledgers."""
        require(isinstance(path, str | os.PathLike), "path of Plan.to_html", path, "the path of a file, such as 'plan.html'")
        Path(path).write_text(html_text(self), encoding="utf-8")

    def source(self) -> str:
        """The local program as Python. Executed with `source_objects`, it defines a function `program` of the mesh.

        `program(mesh)` is a function that takes the leaves of the arguments, and returns those of the results.

        >>> import shardax as sx
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> plan = sx.shard_jit(lambda v: 2 * v, mesh=mesh, in_shardings=jax.P("x")).plan(jax.numpy.ones(4))
        >>> namespace = plan.source_objects()
        >>> exec(plan.source(), namespace)
        >>> namespace["program"](mesh)(jax.numpy.ones(4))
        (Array([2., 2., 2., 2.], dtype=float32),)
        """
        return source(self).text

    def source_objects(self) -> dict[str, Any]:
        """The names with which to execute `source`: what its text uses but does not make, above all large constants."""
        return source(self).objects

    @_jax.boundary
    def text(self, width: int = WIDTH) -> str:
        """What `print` shows, as plain text of `width` columns. (On a terminal, `print` takes its width, and colors.)"""
        require(is_whole(width, 1), "width of Plan.text", width, "a number of columns, such as 120")
        return plain(tables(self), width)

    def __str__(self):
        return shown(tables(self))


@dataclass(frozen=True)
class Placed:
    """An argument or result with its path in the pytree.

    `named`: the path with the argument's name for its number; `shards`: how many pieces it has; `on`: its mesh, "(x=4, y=2)",
    where that is not the program's; `mesh`: that mesh itself.
    """

    path: str
    aval: Any
    sharding: Sharding
    shards: int = 1
    on: str = ""
    named: str = ""
    mesh: Any = None

    @property
    def text(self) -> str:
        return spec_text(self.sharding) + (f" on {self.on}" if self.on and self.sharding.axes else "")


def placed(shardings, avals: Iterable, first: int = 0) -> Iterator[Placed]:
    """The leaves of a pytree of NamedSharding, with the avals of the same leaves; paths leave out their `first` keys."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(shardings)
    for (path, sharding), aval in zip(leaves, avals, strict=True):
        spec, mesh = from_spec(sharding.spec, len(aval.shape)), sharding.mesh
        yield Placed(path_text(path[first:]), aval, spec, shard_count(spec.axes, mesh.shape), f"({describe(mesh)})", "", mesh)


def path_text(path) -> str:
    """
    >>> path_text(jax.tree_util.tree_flatten_with_path([{"w": 0}])[0][0][0])
    '0/w'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")

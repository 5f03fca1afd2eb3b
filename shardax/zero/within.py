"""Within: of the ways in which a step can be made, the fastest, within a limit of memory if there is one.

Each is planned, and has the plan's own estimate and peak. They are noted on the name of the scope around the
annotations of the state, where the plan's report finds them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardax import _jax, program
from shardax.explain.facts import Facts
from shardax.explain.memory import memory as memory_of
from shardax.explain.tables import Group, Row
from shardax.ledger.words import bytes_text, seconds_text
from shardax.transforms import Context
from shardax.zero.by_cost import Dealt


@dataclass(frozen=True)
class Way:
    """How gradients of microbatches are accumulated; whether parameters are gathered again for the backward
    pass: None, where they are never gathered; and whether matrices that an update computes with alike are
    dealt out, `True` by number within each size, or "by cost": None, where there are none.
    """

    accumulate: str
    again: bool | None
    dealt: Dealt | None = None

    def __str__(self):
        again = "" if self.again is None else f", reshard_after_forward={self.again}"
        dealt = "" if self.dealt is None else f", dealt={self.dealt!r}"
        return f"accumulate={self.accumulate!r}{again}{dealt}"


@dataclass(frozen=True)
class Planned:
    """A way, the seconds of a call by its plan, and the bytes on each device at its peak."""

    way: Any
    seconds: float
    peak: int


class Choice(str):
    """The name of a scope, with all that was planned, in the order of the ways, which of it was taken, and
    the limit in bytes, if any.
    """

    planned: Sequence[Planned]
    taken: Planned
    limit: float | None


def fastest(
    ways: Sequence[Way],
    make: Callable[[Way, AbstractContextManager], Any],
    context: Context,
    limit: float | None,
    what: str,
) -> Any:
    """The program of the way that is taken; `make` gives that of each, of which it makes something in a scope
    that notes the choice. Where there is one way, and no limit, nothing is chosen, nor noted.
    """
    if len(ways) == 1 and limit is None:
        return make(ways[0], nullcontext())
    choice = Choice("fastest way")
    programs = [make(way, jax.named_scope(choice)) for way in ways]
    choice.planned = [planned(way, jaxpr, context) for way, jaxpr in zip(ways, programs, strict=True)]
    choice.taken, choice.limit = taken(choice.planned, limit, what), limit
    return programs[choice.planned.index(choice.taken)]


def taken(planned: Sequence[Planned], limit: float | None, what: str) -> Planned:
    """The fastest of those that fit, the first of equals. ValueError, naming the least, where none does.

    >>> again, kept = Planned(Way("scattered", True), 3.0, 1), Planned(Way("scattered", False), 2.0, 2)
    >>> [taken([again, kept], limit, "Zero()").way.again for limit in (1, 2)]
    [True, False]
    """
    fitting = [x for x in planned if limit is None or x.peak <= limit]
    if limit is not None and not fitting:
        least = min(planned, key=lambda x: x.peak)
        raise ValueError(
            f"memory of {what} is {limit:,.0f} bytes, and by its plan the step takes at least {least.peak:,} "
            f"({bytes_text(least.peak)}) on each device, with {least.way}: give more memory or more devices, "
            "a higher stage, smaller microbatches, or offload="
        )
    return min(fitting, key=lambda x: x.seconds)


def planned(way: Any, jaxpr, context: Context) -> Planned:
    """What the plan of a program says of it, priced for the chip that it is made for. Strict mode judges the
    program that is taken, not those that are tried.
    """
    mesh, options = context.mesh, replace(context.options, strict=False, max_gather_bytes=None)
    built = program.build(jaxpr, (None,) * len(jaxpr.in_avals), mesh, options)
    facts = Facts(
        mesh,
        jaxpr,
        built.jaxpr,
        tuple(place.on(mesh) for place in built.arguments),
        tuple(place.on(mesh) for place in built.results),
        donated=frozenset(i for i, argument in enumerate(context.arguments) if argument.donated),
        refinement=built.refinement,
        crossings=(*built.entering, *built.leaving),
    )
    return Planned(way, facts.estimate(facts.network.chip).seconds, memory_of(facts, 1 << 20).peak)


def _choice_of(facts: Facts) -> Choice | None:
    """What was noted in a plan's program."""
    names = (
        name for eqn in facts.global_jaxpr.jaxpr.eqns for name in _jax.scope_names(eqn.source_info.name_stack)
    )
    return next((name for name in names if isinstance(name, Choice)), None)


def choice_group(facts: Facts) -> Iterator[Group]:
    """What a plan shows of it, nothing where nothing was chosen."""
    choice = _choice_of(facts)
    if choice is not None:
        where = f"seconds by the plan on {facts.network.chip.name}, and the peak"
        fits = "" if choice.limit is None else f" that fits into {bytes_text(choice.limit)}"
        heading = f"the fastest{fits}; {where}"
        yield Group(heading, tuple(_row(x, choice) for x in choice.planned))


def _row(x: Planned, choice: Choice) -> Row:
    fits = choice.limit is None or x.peak <= choice.limit
    verdict = "taken" if x is choice.taken else "not faster" if fits else "does not fit"
    return Row(f"{x.way}: {verdict}", (seconds_text(x.seconds), bytes_text(x.peak)))

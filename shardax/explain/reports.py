"""Reports: what a function inside of a program has to say in its plan, as a pipeline its timeline.

The scope around its equations carries the report, so it goes where they go: through tracing caches,
differentiation and partitioning, and away with dead code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.explain.facts import Facts
from shardax.explain.tables import Table


@dataclass(frozen=True)
class Report:
    """What a plan shows besides what it knows itself.

    `name`: of its place on the page. `short`: what the page's contents call it. `figure`: HTML above its
    tables. `data`: the same in lists, dicts, numbers and strings, for JSON.
    """

    name: str
    short: str
    tables: tuple[Table, ...]
    figure: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Maker = Callable[[Facts, list[Any]], Report]


class Reported(str):
    """The name of a scope around equations, and what makes the report on them: of the plan and the equations
    of the local program that are in the scope, outermost."""

    make: Maker


def scope(name: str, make: Maker) -> AbstractContextManager:
    """What is made inside has this report. `make` must hold no traced values."""
    named = Reported(name.replace("/", "\\"))
    named.make = make
    return jax.named_scope(named)


def reports(plan: Facts) -> list[Report]:
    """Those on the equations of the local program, in its order."""
    found: dict[int, tuple[Reported, list[Any]]] = {}
    for name, eqn in _reported(plan.local_jaxpr):
        found.setdefault(id(name), (name, []))[1].append(eqn)
    return [name.make(plan, eqns) for name, eqns in found.values()]


def _reported(jaxpr) -> Iterator[tuple[Reported, Any]]:
    for eqn in _jax.closed(jaxpr).jaxpr.eqns:
        names = [n for n in _jax.scope_names(eqn.source_info.name_stack) if isinstance(n, Reported)]
        if names:
            yield names[0], eqn
        else:
            for body in jaxprs_in_params(eqn.params):
                yield from _reported(body)

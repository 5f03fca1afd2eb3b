"""Zero: the transform by which the devices that compute on different data share optimizer state and parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax, program
from shardax.annotations.annotate import annotate_p, bind_annotation, describe
from shardax.annotations.explicit import shape_of
from shardax.graph import inline
from shardax.sharding import Axes, Sharding, entries_of, entry_axes, replicated
from shardax.transforms import Argument, Context
from shardax.validation import require
from shardax.zero.inside import Inside
from shardax.zero.rest import split_further
from shardax.zero.roles import Roles, roles

Stage = Literal[1, 2, 3]


@dataclass(frozen=True)
class Zero:
    """A transform of train steps."""

    axis: str | Axes = "data"
    stage: Stage = 1

    def __post_init__(self):
        names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        require(names and all(isinstance(a, str) for a in names), "axis of Zero", self.axis, "a name, or a tuple of names")
        require(self.stage in (1, 2, 3), "stage of Zero", self.stage, "1, 2 or 3")

    @property
    def axes(self) -> Axes:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def __call__(self, jaxpr, context: Context):
        self._check(context)
        jaxpr, succeeded = _jax.dce(jaxpr), _succeeded(context)
        found = roles(inline.from_jaxpr(jaxpr), succeeded)
        if not found.parameters:
            raise ValueError(_not_found(self, context, succeeded))
        before = _without_it(jaxpr, context, self.axes)
        after = {i: self._split(before[i], context.arguments[i], context, found) for i in found.state}
        split = found.state if self.stage == 3 else found.optimizer
        shardings = {i: after[i] if i in split else before[i] for i in found.state}
        return _resting(self._inside(jaxpr, after, found), shardings, found)

    def _inside(self, jaxpr, split: Mapping[int, Sharding], found: Roles):
        if self.stage == 1:
            return jaxpr
        of_shape = {jaxpr.in_avals[i].shape: split[i] for i in found.parameters}
        known = [split[i] if self.stage == 3 and i in found.parameters else None for i in range(len(jaxpr.in_avals))]
        return Inside(of_shape, found.accumulators, words="Zero")(jaxpr, known)[0]

    def _split(self, before: Sharding, argument: Argument, context: Context, found: Roles) -> Sharding:
        shape = argument.type.shape
        return split_further(before, shape, self.axes, context.mesh.shape, last=(0,) if shape in found.scanned else ())

    def _check(self, context: Context) -> None:
        for axis in self.axes:
            if axis not in context.mesh.shape:
                raise ValueError(
                    f"axis of Zero is {self.axis!r}, and the mesh ({describe(context.mesh)}) has no axis {axis!r}: name the "
                    "axis that splits the batch"
                )


def _succeeded(context: Context) -> dict[int, int]:
    """The state, each argument with the result that succeeds it."""
    return {r.succeeds: number for number, r in enumerate(context.results) if r.succeeds is not None}


def _without_it(jaxpr, context: Context, axes: Axes) -> Sequence[Sharding]:
    """How the arguments rest without ZeRO: as requested, or where other axes split something, as completion has them."""
    own = [a.sharding for a in context.arguments]
    if all(size == 1 for axis, size in context.mesh.shape.items() if axis not in axes):
        return [replicated(len(a.type.shape)) if s is None else _closed(s, a) for s, a in zip(own, context.arguments, strict=True)]
    return program.completed_arguments(jaxpr, context.mesh)


def _closed(spec, argument: Argument) -> Sharding:
    dims = tuple(map(entry_axes, entries_of(spec)))
    return Sharding(dims + ((),) * (len(argument.type.shape) - len(dims)))


def _resting(jaxpr, shardings: Mapping[int, Sharding], found: Roles):
    """The program whose state rests so."""
    plain = _jax.replaced_eqns(jaxpr, list(_without_requests(jaxpr, shardings, found)))
    state = found.state

    def run(*args):
        args = [_rests(x, shardings[i], "argument") if i in shardings else x for i, x in enumerate(args)]
        outs = jaxpr_as_fun(plain)(*args)
        for i, r in state.items():
            outs[r] = _rests(outs[r], shardings[i], "result")
        return outs

    return jax.make_jaxpr(run)(*map(shape_of, jaxpr.in_avals))


def _rests(x, sharding: Sharding, role):
    return bind_annotation(x, sharding.dims, "Zero", role)


def _without_requests(jaxpr, shardings, found: Roles) -> Iterator[Any]:
    """The equations, of which those that say how the state rests say nothing."""
    arguments = {jaxpr.jaxpr.invars[i] for i in shardings}
    results = {jaxpr.jaxpr.outvars[r] for r in found.state.values()}
    for eqn in jaxpr.jaxpr.eqns:
        of_argument = eqn.primitive is annotate_p and eqn.params["role"] == "argument" and eqn.invars[0] in arguments
        of_result = eqn.primitive is annotate_p and eqn.params["role"] != "inside" and eqn.outvars[0] in results
        if of_argument or of_result:
            eqn = eqn.replace(params={**eqn.params, "dims": (None,) * len(eqn.params["dims"]), "role": "implied", "like": None})
        yield eqn


def _not_found(zero: Zero, context: Context, succeeded) -> str:
    return "nothing"

"""Zero: the transform by which devices that compute on different data share what they would all keep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax, program
from shardax.annotations.annotate import annotate_p, bind_annotation, describe
from shardax.annotations.explicit import shape_of
from shardax.cost import noted
from shardax.explain.facts import Facts
from shardax.explain.tables import Table
from shardax.graph import inline
from shardax.sharding import (
    Axes,
    AxisSizes,
    Owing,
    Sharding,
    at_rest,
    entries_of,
    entry_axes,
    replicated,
    shard_count,
)
from shardax.transforms import Argument, Context
from shardax.validation import is_integer, is_number, require
from shardax.zero.by_cost import BY_COST, Costs, Dealt
from shardax.zero.inside import Inside, OfShape
from shardax.zero.offload import Offload, on_device, require_memory
from shardax.zero.padded import Shape, around, cuts
from shardax.zero.resident import OPTIMIZER, PARAMETER, Resident, filled, resident
from shardax.zero.rest import padded_dim, split_further, split_padded
from shardax.zero.roles import Roles, is_update, roles
from shardax.zero.stacks import dealt_ways
from shardax.zero.together import together
from shardax.zero.whole import repeated_group
from shardax.zero.within import Way, choice_group, fastest

Accumulate = Literal["scattered", "unreduced"]
Offloaded = Literal["optimizer", "parameters"]


@dataclass(frozen=True)
class Zero:
    """A transform of train steps, by which the devices along an axis that splits the batch share what each of
    them would hold whole (ZeRO, arXiv 1910.02054, section 5).

        stage   rests split over `axis`       sent per step, of the parameters' size
        1       optimizer state               2: gradients reduce-scattered, new parameters gathered
        2       and gradients, as made        2
        3       and parameters                3: gathered forward and backward, in the compute dtype

    The step is as for one device, its optimizer any. What is split already, over tensor or expert axes, is
    split further. Each array is split along the largest dim that the axis divides, the minor-most, and those
    along which the update needs whole matrices, only where it divides no other, and stays whole where there
    is none: the plan lists both, in bytes. A state that
    `sx.zero.init` made rests padded there, and the step takes and gives it in true shapes.

    Args:
      axis: the name of a mesh axis that splits the batch, or a tuple of several. One of several batch axes
        alone shards within its groups, with replicas across the others (hybrid sharding).
      stage: 1, 2 or 3.
      accumulate: how a loop over microbatches accumulates gradients. "unreduced": each device its own, of
        full size, reduced once per step; "scattered": each its shard, reduced for each microbatch. None:
        "unreduced" in stage 1 and in a pipeline, else "scattered".
      reshard_after_forward: in stage 3, gather parameters again for the backward pass. False keeps what the
        forward pass gathered, where that sends less. None: True.
      prefetch: in stage 3, a loop over layers gathers the parameters of the next layer while it computes with
        those of this one, in both passes: two layers' are there at once. It is unrolled by two. For where XLA
        gathers asynchronously (see `docs/zero.md`).
      offload: "optimizer", "parameters", or a tuple of both: what rests in the host's memory, `pinned_host`,
        and is brought to the device where the step reads it, of stacked layers one layer at a time.
      update_on: "device", or "host": there the host itself updates what rests in its memory, and optimizer
        state is not brought to the device.
      dealt: whether separate matrices with which an optimizer computes alike (Muon, Shampoo, SOAP) become
        stacks, of which each device computes with some of the matrices. True: each stack by number. "by
        cost": matrices of several sizes are dealt out together, so that the device that takes longest takes
        the least time, where that is less than by number. Where it has no such matrices nothing is done.
        None: planned in each of these ways, and done as the step is fastest, by the plan's estimate for the
        chip of `Options`; not under `offload`. The plan lists them.
      memory: bytes that the step may take on each device, by `Plan.memory().peak`. Of `accumulate`,
        `reshard_after_forward` and `dealt` those that are None are chosen then: each combination is planned,
        and the fastest that fits is taken, as of `dealt`.

    Raises ValueError where the mesh has no such axis, where the axis splits parameters and not the batch, for
    a function in which no optimizer's update is found, where devices have no such memory, and where state is
    padded for another axis or mesh, or does not come back in the tree in which it came.

    >>> import jax, optax, shardax as sx
    >>> tx = optax.sgd(1e-3, momentum=0.9)
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> def step(state, x_BM):
    ...     params, moments = state
    ...     loss, grads = jax.value_and_grad(lambda w: ((x_BM @ w) ** 2).mean())(params)
    ...     updates, moments = tx.update(grads, moments)
    ...     return (optax.apply_updates(params, updates), moments), loss
    >>> how = {"mesh": mesh, "in_shardings": (None, jax.P("data")), "donate_argnums": 0}
    >>> train = sx.shard_jit(step, transforms=[sx.zero.Zero("data", stage=1)], **how)
    >>> params = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> state = params, jax.eval_shape(tx.init, params)
    >>> plan = train.plan(state, jax.ShapeDtypeStruct((4096, 64), "float32"))
    >>> [c.kind for c in plan.collectives if c.shape]
    ['reduce_scatter', 'all_gather']
    """

    axis: str | Axes = "data"
    stage: int = 1
    accumulate: Accumulate | None = None
    reshard_after_forward: bool | None = None
    prefetch: bool = False
    offload: Offloaded | tuple[Offloaded, ...] = ()
    update_on: Literal["device", "host"] = "device"
    memory: float | None = None
    dealt: Dealt | None = None
    rests_state: ClassVar[bool] = True

    def __post_init__(self):
        is_names = bool(self.axes) and all(isinstance(axis, str) for axis in self.axes)
        is_names = is_names and len(set(self.axes)) == len(self.axes)
        require(is_names, "axis of Zero", self.axis, "the name of a mesh axis, or a tuple of several")
        is_stage = is_integer(self.stage, 1) and self.stage <= 3
        require(is_stage, "stage of Zero", self.stage, "1, 2 or 3")
        ways = (None, "scattered", "unreduced")
        require(
            self.accumulate in ways, "accumulate of Zero", self.accumulate, "'scattered', 'unreduced' or None"
        )
        require(
            self.memory is None or is_number(self.memory, 0), "memory of Zero", self.memory, "bytes, or None"
        )
        ways = (None, True, False, BY_COST)
        require(self.dealt in ways, "dealt of Zero", self.dealt, f"True, False, {BY_COST!r} or None")
        kinds, update_on = self.offloaded, self.update_on
        expected = "'optimizer', 'parameters', or a tuple of them"
        is_kinds = all(isinstance(kind, str) and kind in ("optimizer", "parameters") for kind in kinds)
        require(is_kinds, "offload of Zero", self.offload, expected)
        require(update_on in ("device", "host"), "update_on of Zero", update_on, "'device' or 'host'")
        again = self.reshard_after_forward
        is_way = again is None or isinstance(again, bool)
        require(is_way, "reshard_after_forward of Zero", again, "True, False or None")
        require(isinstance(self.prefetch, bool), "prefetch of Zero", self.prefetch, "True or False")
        if self.prefetch and (self.stage < 3 or "parameters" in kinds):
            raise ValueError(
                f"prefetch of Zero is True, stage {self.stage} and offload {self.offload!r}: it gathers "
                "ahead the parameters that stage 3 keeps split on the devices; leave it out, or give stage=3 "
                "and no offload='parameters'"
            )
        if update_on == "host" and "optimizer" not in kinds:
            raise ValueError(
                f"update_on of Zero is 'host', and offload is {self.offload!r}: the host updates what rests "
                "in its memory, so give offload='optimizer' too"
            )

    def __str__(self):
        offload = f", offload={self.offload!r}" if self.offload else ""
        host = f", update_on={self.update_on!r}" if self.update_on == "host" else ""
        prefetch = ", prefetch=True" if self.prefetch else ""
        memory = f", memory={self.memory!r}" if self.memory is not None else ""
        dealt = f", dealt={self.dealt!r}" if self.dealt is not None else ""
        return f"Zero(axis={self.axis!r}, stage={self.stage}{memory}{dealt}{prefetch}{offload}{host})"

    @property
    def axes(self) -> Axes:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def __call__(self, jaxpr, context: Context):
        self._check_axes(context)
        jaxpr = _jax.dce(jaxpr)
        true = self._true_shapes(jaxpr, context)
        jaxpr = together(jaxpr)
        scattering = noted.without_whole_sums(jaxpr)  # another one where it is a pipeline
        found = self._roles(jaxpr, context)
        before, sizes = self._before(jaxpr, context), context.mesh.shape
        split = {
            i: self._split(before[i], context.arguments[i].type.shape, true.get(i), found, i, sizes)
            for i in found.state
        }
        kept = found.parameters if self.stage < 3 else ()
        rests = {i: before[i] if i in kept else split[i] for i in found.state}

        may_deal = self.dealt or self.dealt is None and not self.offload
        costs = Costs(context.mesh, self.axes, context.options.priced_for)
        deals = dealt_ways(jaxpr, rests, costs, self.dealt) if may_deal else {}

        def made(way: Way, scope: AbstractContextManager):
            own, roles = deals[way.dealt] if way.dealt else jaxpr, found
            if way.accumulate == "scattered":
                own = noted.without_whole_sums(own)
            if own is not jaxpr:
                roles = self._roles(own, context)
            inside = self._inside(own, context, before, split, roles, true, way)
            resting = _resting(inside, rests, roles, str(self), scope)
            return self._offloaded(resting, context, roles) if self.offload else resting

        ways = self._ways(found, scattering is not jaxpr, list(deals))
        return fastest(ways, made, context, self.memory, str(self))

    def _ways(self, found: Roles, in_pipeline: bool, deals: Sequence[Dealt]) -> list[Way]:
        """Those that are left open; of how to accumulate and gather the default one, where memory has no
        limit.
        """
        ways: list[Accumulate] = ["unreduced", "scattered"]
        default, other = ways if self.stage == 1 or in_pipeline else ways[::-1]
        open_ = self.memory is not None and (in_pipeline or bool(found.accumulators))
        accumulate = [self.accumulate or default, *[other] * (open_ and self.accumulate is None)]
        keeps = self.memory is not None and self.stage == 3 and self.reshard_after_forward is None
        again = [self.reshard_after_forward is not False, *[False] * keeps] if self.stage == 3 else [None]
        dealt = [*([False] if self.dealt is None else []), *deals] if deals else [None]
        return [Way(a, g, d) for a in accumulate for g in again for d in dealt]

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The step takes and gives true shapes, wherever its state rests padded."""
        return around(function, self.axes, "Zero")

    def traced_types(self, arguments: Sequence[Argument]) -> Sequence[jax.ShapeDtypeStruct]:
        """The step is traced as one on the device, wherever its state rests."""
        return [on_device(a.type) if self.offload else a.type for a in arguments]

    def _offloaded(self, jaxpr, context: Context, found: Roles):
        require_memory(context.mesh, f"offload of Zero is {self.offload!r}")
        kinds = self.offloaded
        hosted = {
            **(found.optimizer if "optimizer" in kinds else {}),
            **(found.parameters if "parameters" in kinds else {}),
        }
        how = Offload(self.update_on == "host")
        return how.program(jaxpr, hosted.keys(), set(hosted.values()))

    @property
    def offloaded(self) -> tuple[str, ...]:
        return self.offload if isinstance(self.offload, tuple) else (self.offload,)

    def resident(self, plan: Facts) -> Resident:
        """What the state of a step that this transformed takes on each device, in bytes, with it and without;
        `print` shows it as a table, which is part of the plan's own text too.
        """
        return resident(plan, str(self), self.axes, self.stage)

    def report(self, plan: Facts) -> Table:
        """What a plan shows of it."""
        table = self.resident(plan).table()
        more = (*choice_group(plan), *repeated_group(plan, self.axes))
        return replace(table, groups=(*table.groups, *filled(more, len(table.heads))))

    def _roles(self, jaxpr, context: Context) -> Roles:
        graph, succeeded = inline.from_jaxpr(jaxpr), _succeeded(context)
        found = roles(graph, succeeded)
        if not found.parameters or not is_update(graph, succeeded):
            raise ValueError(self._not_found(context, found))
        return found

    def _before(self, jaxpr, context: Context) -> Sequence[Sharding]:
        """How arguments rest without ZeRO: as requested, or where other axes split something, as completion
        has them.
        """
        sizes = context.mesh.shape
        if any(size > 1 for axis, size in sizes.items() if axis not in self.axes):
            return program.completed_arguments(jaxpr, context.mesh)
        return [at_rest(_requested(a), a.type.shape, sizes) for a in context.arguments]

    def _split(
        self, before: Sharding, shape: Shape, true: Shape | None, found: Roles, number: int, sizes: AxisSizes
    ) -> Sharding:
        if true is not None:
            return split_padded(before, shape, true, self.axes, sizes)
        last, mixed = (0,) if shape in found.scanned else (), found.mixed.get(number, ())
        return split_further(before, shape, self.axes, sizes, last, mixed)

    def _inside(
        self,
        jaxpr,
        context: Context,
        before: Sequence[Sharding],
        split: Mapping[int, Sharding],
        found: Roles,
        true: Mapping[int, Shape],
        way: Way,
    ):
        """The program with annotations on what it makes of the gradients, which are pending over all axes of
        the batch.
        """
        batch = {axis for a in context.arguments if not a.is_state for axis in _requested(a).axes}
        batch = tuple(axis for axis in context.mesh.shape if axis in {*batch, *self.axes})
        shapes = {i: true[i] if i in true else jaxpr.in_avals[i].shape for i in found.parameters}
        padded = {true[i]: split[i] for i in found.optimizer if i in true}
        whole = [i for i in shapes if i not in true and split[i] == before[i]]  # whose gradients need not be
        split = {**split, **{i: padded[shapes[i]] for i in whole if shapes[i] in padded}}
        unreduced, scattered = (
            _of_shape([(shapes[i], _pending(s[i], batch)) for i in shapes]) for s in (before, split)
        )
        inside = Inside(
            source=str(self),
            made=scattered if self.stage > 1 else {},
            accumulated=unreduced if way.accumulate == "unreduced" else scattered,
            accumulators=found.accumulators,
            again=bool(way.again),
            prefetched=self.axes if self.prefetch else (),
        )
        known = [split[i] if self.stage == 3 and i in shapes else None for i in range(len(jaxpr.in_avals))]
        return inside.annotated(jaxpr, known)[0]

    def _true_shapes(self, jaxpr, context: Context) -> dict[int, Shape]:
        """Of the arguments that rest padded or are buckets, by their numbers."""
        true, count = cuts(jaxpr), shard_count(self.axes, context.mesh.shape)
        for i, shape in true.items():
            argument = context.arguments[i]
            padded = argument.type.shape
            if padded[padded_dim(padded, shape)] % count:
                raise ValueError(
                    f"{argument.path} of shape {list(shape)} is padded to {list(padded)}, and there are "
                    f"{count} devices along {self.axis!r} (mesh {describe(context.mesh)}): it was padded for "
                    "another mesh; sx.zero.unpad the state, and sx.zero.pad it for this one"
                )
        return true

    def _check_axes(self, context: Context) -> None:
        for axis in self.axes:
            if axis not in context.mesh.shape:
                raise ValueError(
                    f"axis of Zero is {self.axis!r}, and the mesh ({describe(context.mesh)}) has no axis "
                    f"{axis!r}: name the axis that splits the batch"
                )
            splits = [a for a in context.arguments if axis in _requested(a).axes]
            arrays = (a for a in context.arguments if a.type.shape and not a.is_state)
            others = [a for a in arrays if a.sharding is not None]
            if splits and others and all(a.is_state for a in splits):
                raise ValueError(
                    f"axis of Zero is {self.axis!r}, and {axis!r} splits no batch: in_shardings give "
                    f"{splits[0].path} {splits[0].sharding}, and {others[0].path} {others[0].sharding}. "
                    "Devices along such an axis compute on the same data, and have nothing to share: name "
                    "the axis that splits the batch"
                )

    def _not_found(self, context: Context, found: Roles) -> str:
        of_call = [a.is_state for a in context.arguments if a.path or a.is_state]  # no constant
        state = sum(of_call)
        return (
            f"{self} finds no optimizer's update in this function. It looked for state (of "
            f"{len(of_call)} arguments {state} come back in results), for parameters among it "
            f"(from {len(found.parameters)} of these something is computed that is differentiated), and for "
            "new state that is made of the old: give it the whole step, which takes and returns parameters "
            "and optimizer state, with donate_argnums= for these, or say where the update is, with "
            "sx.zero.shard(tx, ...) around an optax optimizer"
        )


def _succeeded(context: Context) -> dict[int, int]:
    """The state, each argument with the result that succeeds it. Of what is not donated, the result of its
    type and, where there are several, of the end of its path.
    """
    succeeded = {r.succeeds: number for number, r in enumerate(context.results) if r.succeeds is not None}
    free = {number: r for number, r in enumerate(context.results) if r.succeeds is None}
    for i, argument in enumerate(context.arguments):
        if i not in succeeded and argument.is_state:
            alike = [
                number
                for number, r in free.items()
                if (r.type.shape, r.type.dtype) == (argument.type.shape, argument.type.dtype)
            ]
            tail = argument.path.partition("/")[2]
            number = next((n for n in alike if free[n].path.endswith(tail)), next(iter(alike), None))
            if number is not None:
                succeeded[i] = number
                del free[number]
    return succeeded


def _requested(argument: Argument) -> Sharding:
    rank = len(argument.type.shape)
    if argument.sharding is None:
        return replicated(rank)
    dims = tuple(map(entry_axes, entries_of(argument.sharding)))
    return Sharding(dims + ((),) * (rank - len(dims)))


def _pending(sharding: Sharding, axes: Axes) -> Sharding:
    return Sharding(sharding.dims, Owing(tuple(axis for axis in axes if axis not in sharding.axes)))


def _of_shape(pairs: Sequence[tuple[tuple[int, ...], Sharding]]) -> OfShape:
    """The sharding of each shape; none for a shape that has several."""
    several = {
        shape for shape, sharding in pairs for other, its in pairs if shape == other and sharding != its
    }
    return {shape: sharding for shape, sharding in pairs if shape not in several}


def _resting(jaxpr, rests: Mapping[int, Sharding], found: Roles, source: str, scope: AbstractContextManager):
    """The program whose state rests so, whatever was requested of it; arguments are annotated in `scope`."""
    plain = _jax.replaced_eqns(jaxpr, list(_without_requests(jaxpr, found)))
    role = {i: PARAMETER if i in found.parameters else OPTIMIZER for i in found.state}

    def run(*args):
        with scope:
            args = [
                bind_annotation(x, rests[i].dims, f"{source}, {role[i]}", "argument") if i in rests else x
                for i, x in enumerate(args)
            ]
        outs = jaxpr_as_fun(plain)(*args)
        for i, r in found.state.items():
            outs[r] = bind_annotation(outs[r], rests[i].dims, f"{source}, {role[i]}", "result")
        return outs

    return jax.make_jaxpr(run)(*map(shape_of, jaxpr.in_avals))


def _without_requests(jaxpr, found: Roles) -> Iterator[Any]:
    """The equations, of which those that say how the state rests say nothing any more."""
    arguments = {jaxpr.jaxpr.invars[i] for i in found.state}
    results = {jaxpr.jaxpr.outvars[r] for r in found.state.values()}
    for eqn in jaxpr.jaxpr.eqns:
        role = eqn.params["role"] if eqn.primitive is annotate_p else None
        if (
            role == "argument"
            and eqn.invars[0] in arguments
            or role in ("result", "type", "implied")
            and eqn.outvars[0] in results
        ):
            open_ = {"dims": (None,) * len(eqn.params["dims"]), "role": "implied", "like": None}
            eqn = eqn.replace(params={**eqn.params, **open_})
        yield eqn

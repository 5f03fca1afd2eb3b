"""emit: carries the decisions out on shards. Mechanical: everything that is chosen was chosen before.

Called inside `shard_map`; every value is kept in all the layouts in which something read it, so what was
gathered is shared.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util

from shardax import _jax
from shardax.completion.node_classes import NodeClasses
from shardax.graph import annotations
from shardax.graph.graph import Node, Value
from shardax.ledger import causes
from shardax.ledger.lines import with_short_lines
from shardax.partition.decisions import Decision, Decisions, Origin, Reshard
from shardax.partition.emit_loops import emit_structured
from shardax.partition.owed import Contributions, Owed
from shardax.partition.reasons import Resharded, Settled
from shardax.partition.recordings import Recordings
from shardax.reshard import paths, run
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, replicated_layout
from shardax.spmd_rules.localize import run_local
from shardax.spmd_rules.registry import RULES, Local

Shards = dict[Layout, Any]
Shown = Callable[[Sharding], Sharding]


def emit(
    decisions: Decisions,
    shards: Sequence[Any],
    sizes: AxisSizes,
    shown: Shown = lambda s: s,
    classes: NodeClasses | None = None,
) -> list[Any]:
    """Runs a decided graph on the shards of its inputs; returns those of its outputs. `shown`: a sharding in
    reasons' words. `classes`: of its nodes, where they are known.
    """
    return Emitter(sizes, shown, classes).graph(decisions, shards)


def emit_values(decisions: Decisions, shards: Sequence[Any], sizes: AxisSizes) -> dict[Value, Shards]:
    """As `emit`, but returns what every value is on shards, in each layout in which something read it."""
    emitter = Emitter(sizes)
    emitter.steps(decisions, shards)
    return emitter.env


class Reader(NamedTuple):
    """Who reads a value: operand `place` of a node, which runs by this decision; without a node, result
    `place` of the graph at hand.
    """

    node: Node | None
    decision: Decision | None = None
    place: int = 0


@dataclass(frozen=True)
class Copies:
    """Who reads each value of a graph first in each layout, and how; values that are another by a new name
    count as that one."""

    roots: dict[Value, Value] = field(default_factory=dict)
    readers: dict[tuple[Value, Layout], tuple[Reshard, Reader]] = field(default_factory=dict)

    @classmethod
    def of(cls, decisions: Decisions) -> "Copies":
        copies = cls()
        for node, decision in decisions.pairs():
            copies.note(node.inputs, decision.reshards, node, decision)
            if annotations.renames(node):
                copies.roots[node.outputs[0]] = copies.roots.get(node.inputs[0], node.inputs[0])
        copies.note(decisions.graph.outputs, decisions.outputs)
        return copies

    def note(
        self,
        values: Sequence[Value],
        reshards: Sequence[Reshard],
        node: Node | None = None,
        decision: Decision | None = None,
    ) -> None:
        for i, (value, reshard) in enumerate(zip(values, reshards, strict=True)):
            if reshard.needed and not value.is_literal:
                key = self.roots.get(value, value), reshard.target
                self.readers.setdefault(key, (reshard, Reader(node, decision, i)))

    def reader(self, value: Value, layout: Layout) -> tuple[Reshard, Reader] | None:
        return self.readers.get((self.roots.get(value, value), layout))


class Emitter:
    def __init__(self, sizes: AxisSizes, shown: Shown = lambda s: s, classes: NodeClasses | None = None):
        self.sizes = sizes
        self.shown = shown
        self.env: dict[Value, Shards] = {}
        self.copies = Copies()
        self.makers: dict[Value, Origin] = {}
        self.contributions = Contributions(self.makers)
        self.around: Node | None = None  # whose body this is
        self.classes = classes or NodeClasses()
        self.recordings = Recordings()
        self.changes = False  # whether some node's context is another than that around it
        self.stack = source_info_util.current_name_stack()

    def graph(self, decisions: Decisions, shards: Sequence[Any]) -> list[Any]:
        """Runs a decided graph. The values of a body are tracers of its own trace, which must not outlive it:
        they have an `env` of their own.
        """
        around = self.stack, self.env, self.copies, self.recordings, self.changes
        self.stack, self.env, self.recordings = source_info_util.current_name_stack(), {}, Recordings()
        outputs = self.steps(decisions, shards)
        self.stack, self.env, self.copies, self.recordings, self.changes = around
        return outputs

    def steps(self, decisions: Decisions, shards: Sequence[Any]) -> list[Any]:
        self.copies = Copies.of(decisions)
        contexts = {id(node.eqn.ctx): node.eqn for node in decisions.graph.nodes}
        self.changes = self.changes or any(map(_jax.changes_context, contexts.values()))
        for value, layout, shard in zip(decisions.graph.inputs, decisions.inputs, shards, strict=True):
            self.env[value] = {layout: shard}
        for node, decision in decisions.pairs():
            origin = Origin(node, decision)
            with self.at(origin):
                self.node(origin)
        outputs = zip(decisions.graph.outputs, decisions.outputs, strict=True)
        return [self.output(value, reshard, i) for i, (value, reshard) in enumerate(outputs)]

    def at(self, origin: Origin) -> "_UserContext":
        return _UserContext(origin, self.stack, self.changes)

    def output(self, value: Value, reshard: Reshard, i: int):
        """The shard of an output. The collectives that bring it to the requested layout count for the line
        that made it.
        """
        maker = self.makers.get(value)
        if maker is None:
            return self.read(value, reshard, Reader(None, None, i))
        with self.at(maker):
            reader = maker.node if annotations.of_node(maker.node) else None
            return self.read(value, reshard, Reader(reader, None, i))

    def node(self, origin: Origin) -> None:
        node, decision = origin.node, origin.decision
        shards = []
        for i, (value, reshard) in enumerate(zip(node.inputs, decision.reshards, strict=True)):
            shard = None if value.is_literal else self.env[value].get(reshard.target)
            shards.append(self.read(value, reshard, Reader(node, decision, i)) if shard is None else shard)
        if node.bodies:
            around, self.around = self.around, node
            self.contributions.enter(node)
            results = emit_structured(self, node, decision, shards)
            self.around = around
        else:
            results = self.run_local(node, decision, shards)
        renamed = self.env[node.inputs[0]] if annotations.renames(node) else None
        for value, layout, shard in zip(node.outputs, decision.results, results, strict=True):
            self.env[value] = {} if renamed is None else renamed
            self.env[value].setdefault(layout, shard)
            self.makers[value] = origin
        if any(layout.pending for layout in decision.results):
            self.contributions.note(node, decision)

    def run_local(self, node: Node, decision: Decision, shards: Sequence[Any]) -> list[Any]:
        entry, factors = decision.entry, decision.factors
        assert entry and factors

        def run(shards: Sequence[Any]) -> list[Any]:
            return run_local(entry, decision.local(node, self.sizes), factors, shards)

        if entry.anew:
            return run(shards)
        layouts, splits = (decision.operands, decision.results), tuple(decision.splits.items())
        kind = self.classes.of(node)[0].number, id(entry), layouts, splits
        return self.recordings.run(kind, run, shards)

    def read(self, value: Value, reshard: Reshard, reader: Reader):
        """The shard of a value in the layout of `reshard`, resharded unless it has that layout already."""
        if value.is_literal:
            return self.resharded(value, _literal(value), reshard, reader)
        shards = self.env[value]
        if reshard.target not in shards:
            shards[reshard.target] = self.resharded(*self.held(value, reshard.source), reshard, reader)
        return shards[reshard.target]

    def held(self, value: Value, layout: Layout):
        """A value and its shard in a layout: its own, or that of what was annotated to be it; else the copy
        that a later reader would make, or one that is made so.
        """
        known: Value | None = value
        while known is not None:
            if layout in self.env[known]:
                return known, self.env[known][layout]
            known = self.annotated(known)
        reader = self.copies.reader(value, layout)
        if reader is None:
            self.env[value][layout] = self.made_replicated(value)
        else:
            self.copy(value, *reader)
        return value, self.env[value][layout]

    def copy(self, value: Value, reshard: Reshard, reader: Reader) -> None:
        """Reads a value as a later reader will."""
        if reader.node is None or reader.decision is None:
            self.output(value, reshard, reader.place)
        else:
            with self.at(Origin(reader.node, reader.decision)):
                self.read(value, reshard, reader)

    def annotated(self, value: Value) -> Value | None:
        """What was annotated to be a value."""
        node = self.makers[value].node if value in self.makers else None
        if node is None or not annotations.of_node(node) or node.inputs[0].is_literal:
            return None
        return node.inputs[0]

    def made_replicated(self, value: Value):
        """A literal, what is `made_anywhere`, or one of them annotated, on a device that makes all of it."""
        if value.is_literal:
            return _literal(value)
        node = self.makers[value].node
        if annotations.of_node(node):
            return self.made_replicated(node.inputs[0])
        entry = RULES[node.name]
        assert entry.made_anywhere, node.name
        scalars, results = (
            (replicated_layout(v.shape) for v in values) for values in (node.inputs, node.outputs)
        )
        local = Local(node, tuple(scalars), tuple(results), {}, self.sizes)
        shards = [
            self.read(v, Reshard(lay, lay), Reader(node))
            for v, lay in zip(node.inputs, local.operands, strict=True)
        ]
        return run_local(entry, local, entry.factors(node), shards)[0]

    def resharded(self, value: Value, shard, reshard: Reshard, reader: Reader):
        if reshard.source == reshard.target:
            return shard
        path = paths.plan(reshard.source, reshard.target, value.shape, value.itemsize, self.sizes)
        for step in path.steps:
            owed = self.contributions.owed(value, settled) if (settled := _settled_axes(step)) else None
            reason, cause = self.reason(value, reshard, step, reader, owed)
            with (
                self.at(owed.origin) if owed else nullcontext(),
                causes.scope("ppermute" if step.kind == "halo" else step.kind, reason, cause),
            ):
                kind, stepped = (step, value.shape), partial(self.stepped, step, value.shape)
                (shard,) = self.recordings.run(kind, stepped, [shard])
        return shard

    def stepped(self, step: paths.Step, shape: tuple[int, ...], shards: Sequence[Any]) -> list[Any]:
        (shard,) = shards
        return [run.apply(paths.Path((step,), step.nbytes), shard, shape, self.sizes)]

    def reason(self, value: Value, reshard: Reshard, step: paths.Step, reader: Reader, owed: Owed | None):
        """Why a step of a reshard is taken: the words, and the facts. `owed`: what it settles, if that is
        known.
        """
        if settled := _settles(step):
            carried = self.around is not None or not self.contributions.came_in(value)
            name = owed.origin.node.name if owed else "carry" if carried else "argument"
            return f"{settled} of {name}", Settled(step.axes, owed, carried)
        around = None if reader.node else self.around
        cause = Resharded(
            value,
            reshard.source,
            reshard.target,
            step.axes,
            reader.node,
            reader.decision,
            reader.place,
            around,
        )
        words = f"what {around.name} gives back" if around else purpose(reader.node)
        return reshard_reason(words, self.shown(reshard.target.sharding)), cause


def _settles(step: paths.Step) -> str | None:
    """The kind of the reduction that a step settles, None if it settles none."""
    settled = _settled_axes(step)
    return next((reduction for axis, reduction in step.source.pending if axis in settled), None)


def _settled_axes(step: paths.Step) -> Axes:
    """The axes over which a step settles what is pending."""
    left = step.layout.pending_axes
    return tuple(a for a in step.source.pending_axes if a in step.axes and a not in left)


def _literal(value: Value):
    """A literal as a numpy array, which has no mesh. One made inside a shard_map would have the type of its
    mesh.
    """
    is_key = jax.numpy.issubdtype(value.aval.dtype, jax.dtypes.extended)
    return value.literal if is_key else np.asarray(value.literal, value.aval.dtype)


def purpose(reader: Node | None) -> str:
    """For whom a value is resharded: an annotation is named by its words, any other node by its name."""
    if reader is None:
        return "result"
    annotation = annotations.of_node(reader)
    return with_short_lines(annotation.source) if annotation else reader.name


def reshard_reason(purpose: str, sharding: Sharding) -> str:
    """The reason, in the plan's words, of a reshard to this sharding."""
    return f"{purpose} in {sharding}"


class _UserContext:
    """The equation's own source line and names, so that profiles and HLO show the user's code, and where that
    `changes` anything its context; the mesh is the one here. (A class: it is entered for every node.)"""

    __slots__ = ("managers",)

    def __init__(self, origin: Origin, stack, changes: bool):
        node, stack = origin.node, _jax.marked(stack, origin, origin.node.scope)
        source = _jax.with_user_frame(node.eqn, node.callers)
        self.managers: tuple[Any, ...] = (source_info_util.user_context(source.traceback, name_stack=stack),)
        if changes:
            local_mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
            self.managers += (node.eqn.ctx.manager, local_mesh)

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*error)

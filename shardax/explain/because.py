"""The facts behind a collective, in words: which two shardings clashed, what was summed, what a lowering
exchanged.

A fact about a sharding names the value that has it, and the annotation that it came from, which completion's
origins tell.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardax import _jax
from shardax.completion.complete import UPDATED_AT_REST, Origin
from shardax.differentiated import is_differentiated, is_transposed
from shardax.explain.facts import Facts
from shardax.explain.values import Story
from shardax.graph import annotations
from shardax.graph.graph import Node, Value
from shardax.ledger import causes
from shardax.ledger.collectives import AS_WRITTEN, Collective, array_text
from shardax.ledger.lines import assigned, line_beside, line_text, with_short_lines
from shardax.ledger.words import as_one, form, spec_text, times
from shardax.meshes.crossing import Crossed
from shardax.partition.decisions import Decision, Decisions
from shardax.partition.reasons import Resharded, Settled
from shardax.sharding import Axes, Layout, Sharding, shard_count
from shardax.spmd_rules.equations import moves
from shardax.spmd_rules.registry import happens_once
from shardax.spmd_rules.rule import REDUCTIONS, UNSPLIT, Factors, TensorFactors
from shardax.spmd_rules.sends import Sent

DEPTH = 50  # operations through which a layout is followed that completion did not request


class Because:
    """Tells the causes of a plan's collectives, each once."""

    def __init__(self, plan: Facts):
        self.plan = plan
        self.story = Story(plan)
        self.completion = plan.values
        self.told: dict[causes.Cause, str] = {}
        self.barren: dict[tuple[Value, int, frozenset[str]], int] = {}  # nothing is found so many steps back
        self.makers = dict(_makers(plan.decisions)) if plan.decisions else {}
        self.results = [place.path for place in plan.results()]
        self.last = set(_last_of_lines(self.story.nodes))
        self.called = functools.cache(self.story.called)

    def of(self, c: Collective) -> str:
        if c.cause is None:
            return "the program sends it itself" if c.reason == AS_WRITTEN else ""
        if isinstance(c.cause, causes.Combined):
            return "\n".join(self.combined(c))
        if c.cause not in self.told:
            tell: Callable[[Any], str] = _TOLD[type(c.cause)]
            self.told[c.cause] = tell(_Teller(self, c.line), c.cause)  # type: ignore[call-arg]
        return self.told[c.cause]

    def combined(self, c: Collective) -> Iterator[str]:
        """Of each that stands in a combined one; those of equal layers, which differ in numbers only, are one
        line.
        """
        alike: dict[tuple[str, str], list[str]] = {}
        for part in c.parts:
            text = ", ".join(filter(None, (f"{part.reason} at {line_text(part.line)}", self.of(part))))
            alike.setdefault((part.line, form(text)), []).append(text)
        return (times(len(texts)) + as_one(texts, exact=True) for texts in alike.values())

    def origin(self, value: Value, dim: int, axes: set[str]) -> Origin | None:
        """The annotation that axes of a dim came from: by completion, or else by an operand that it was made
        of.
        """
        return self._origin(value, dim, frozenset(axes), DEPTH)

    def _origin(self, value: Value, dim: int, axes: frozenset[str], depth: int) -> Origin | None:
        if self.barren.get((value, dim, axes), -1) >= depth:
            return None
        found = self._found(value, dim, axes, depth)
        if found is None:
            self.barren[value, dim, axes] = depth
        return found

    def _found(self, value: Value, dim: int, axes: frozenset[str], depth: int) -> Origin | None:
        if axes <= {*self.completion.sharding(value).dims[dim]}:
            return self.story.root(value, dim)
        node, decision = self.makers.get(value, (None, None))
        if node is None or decision is None or decision.factors is None or not depth:
            return None
        made = {*decision.factors.results[node.outputs.index(value)][dim]}
        operands = zip(
            node.inputs, decision.factors.operands, decision.operands, decision.reshards, strict=True
        )
        for operand, tensor, layout, reshard in operands:
            for d, dim_factors in enumerate(tensor):
                if made & {*dim_factors} and axes <= {*layout.dims[d]} & {*reshard.source.dims[d]}:
                    if origin := self._origin(operand, d, axes, depth - 1):
                        return origin
        return None


SAME = ("optimization_barrier", "reshard")
"""What these make of an argument is called by its path."""


def _makers(decisions: Decisions) -> Iterator[tuple[Value, tuple[Node, Decision]]]:
    for node, decision in decisions.pairs():
        yield from ((value, (node, decision)) for value in node.outputs)
        for body in decision.bodies:
            yield from _makers(body)


def _last_of_lines(nodes: Iterable[Node]) -> Iterator[Value]:
    """For each line of the user's code the value that it makes last, which is the one that it assigns. Not
    where it is differentiated: the gradient comes after that.
    """
    before: Node | None = None
    for node in (*(n for n in nodes if annotations.of_node(n) is None), None):
        if (
            before is not None
            and (node is None or node.line != before.line)
            and not is_differentiated(before.scope)
        ):
            yield from before.outputs
        before = node


class _Teller:
    """Tells one cause; `line` is the line of its collective, which names need not repeat."""

    def __init__(self, because: Because, line: str):
        self.all, self.plan, self.story, self.completion = (
            because,
            because.plan,
            because.story,
            because.completion,
        )
        self.line = line

    # Names and facts

    def name(self, value: Value) -> str:
        """A path, a variable, or what makes it: short, and with its line where that is another one."""
        if value in self.story.arguments:
            return self.story.arguments[value].named or self.story.arguments[value].path
        node = self.story.makers.get(value)
        if node is None:
            return self.inner(value) if value in self.story.owners else f"a constant {array_text(value.aval)}"
        if annotations.of_node(node) or node.name in SAME:
            return self.name(node.inputs[node.outputs.index(value)])
        if moves(node.eqn) and (path := self.path(node.inputs[0])):
            return f"{path}'s {node.name}"
        variable = assigned(node.line)
        if variable and value in self.all.last:
            return variable
        made = f"{variable}'s {node.name}" if variable else node.name
        gradient = is_transposed(node.scope)
        return (f"the gradient's {node.name}" if gradient else made) + self.place(node)

    def path(self, value: Value) -> str:
        """Of an argument, annotated or not."""
        node = self.story.makers.get(value)
        if node is not None:
            return self.path(node.inputs[0]) if annotations.of_node(node) else ""
        return self.name(value) if value in self.story.arguments else ""

    def inner(self, value: Value) -> str:
        """The name of what a body is given, from outside of the body."""
        node = self.story.owners[value]
        i = next(i for body in node.bodies for i, v in enumerate(body.inputs) if v is value)
        return _INNER[node.name](self, node, i, value)

    def spec(self, sharding: Sharding) -> str:
        return spec_text(self.shown(sharding))

    def shown(self, sharding: Sharding) -> Sharding:
        return self.plan.refinement.shown(sharding) if self.plan.refinement else sharding

    def axes(self, axes: Axes) -> str:
        return ", ".join(self.plan.refinement.folded(axes) if self.plan.refinement else axes)

    def fact(self, value: Value, sharding: Sharding, axes: Iterable[str]) -> str:
        """A value with its sharding, and the annotations that these axes come from."""
        by = _by(self.sources(value, sharding, axes))
        if not by and sharding.axes and sharding != self.completion.sharding(value):
            by = f" {AS_IT_RESTS}" if self.path(value) else " as it is made"
        return f"{self.name(value)} {self.spec(sharding)}{by}"

    def sources(
        self, value: Value, sharding: Sharding, axes: Iterable[str], own: bool = True
    ) -> dict[str, str]:
        """The annotations that these axes of a value come from, each with the words for it. `own`: that of an
        argument itself is not called by the argument's path."""
        words: dict[str, str] = {}
        for d, have in enumerate(sharding.dims):
            mine = {*have} & {*axes}
            if mine and (origin := self.all.origin(value, d, mine)):
                words.setdefault(origin.source, self.source(origin, self.name(value) if own else ""))
        return words

    def source(self, origin: Origin, own: str) -> str:
        """ "in_shardings[1]" of the argument itself, whose path is `own`, "x" of what x led to."""
        if origin.source == UPDATED_AT_REST:
            return "how the state rests"
        called = self.all.called(origin.source)
        if called == own:
            return AS_IT_RESTS if origin.source.startswith("argument ") else _head(origin.source)
        of_argument = called != with_short_lines(origin.source)
        return called if of_argument else self.words(origin.source, origin.node)

    def words(self, source: str, node: Node | None) -> str:
        """An annotation's words, with its line."""
        bare = (
            node is not None and node.line and " at " not in source and not source.startswith("out_shardings")
        )
        return (
            f"{source} at {line_beside(node.line, self.line)}" if node and bare else with_short_lines(source)
        )

    # Reshards

    def resharded(self, c: Resharded) -> str:
        if c.source.sharding == c.target.sharding and c.source.pending == c.target.pending:
            sizes = [",".join(map(str, layout.padded)) for layout in (c.source, c.target)]
            fact, reader = (
                self.fact(c.value, c.source.sharding, c.axes),
                c.reader.name if c.reader else "the result",
            )
            return f"{fact}, padded to [{sizes[0]}], against [{sizes[1]}] for {reader}"
        own = c.source.sharding.axes
        if not {*c.axes} & {*own}:  # on the way; all that changes place
            c = replace(c, axes=tuple(a for a in own if _place(c.source, a) != _place(c.target, a)) or own)
        return f"{self.fact(c.value, c.source.sharding, c.axes)} against {self.other(c)}"

    def other(self, c: Resharded) -> str:
        """What clashed with the sharding that the value had."""
        if c.reader is None:
            return self.returned(c)
        if annotation := annotations.of_node(c.reader):
            return self.annotated(c, annotation)
        if c.decision is None:
            requested = self.completion.sharding(c.value)
            by = _by(self.sources(c.value, requested, requested.axes))
            return f"the requested {self.spec(c.target.sharding)}{by}"
        if c.decision.factors is None:
            return self.looped(c, c.reader)
        return self.needed(c, c.reader, c.decision, c.decision.factors)

    def looped(self, c: Resharded, node: Node) -> str:
        """What clashed with the sharding that an operand of a node with bodies had."""
        inside = (n for body in node.bodies for n in body.walk() if happens_once(n))
        called = next((f"{n.name}{self.place(n)} is called once" for n in inside), "")
        if node.name == "scan" and c.place >= sum(_jax.scan_counts(node.params)) and not c.target.dims[0]:
            return f"{node.name}, whose trips are not split{called and f': {called} in each'}"
        takes = f"{node.name}, which takes it {self.spec(c.target.sharding)}"
        return f"{takes}: {called}, on whole arrays" if called and not c.target.sharding.axes else takes

    def place(self, node: Node) -> str:
        """Where a node stands, if that is another line than the collective's."""
        return f" at {line_beside(node.line, self.line)}" if node.line not in ("", self.line) else ""

    def returned(self, c: Resharded) -> str:
        spec = self.spec(c.target.sharding)
        if c.around is not None:
            return f"{spec}, in which {c.around.name} gives it back"
        requested = self.completion.sharding(c.value)
        path = self.all.results[c.place]
        result = f"result {path}".rstrip() if len(self.all.results) > 1 else "the result"
        if requested == c.target.sharding:
            return f"{result} {spec}{_by(self.sources(c.value, requested, requested.axes))}"
        return f"{result} {spec}{self.undivided(c.value, requested)}"

    def annotated(self, c: Resharded, annotation: annotations.Annotation) -> str:
        assert c.reader is not None
        sharding = annotation.sharding.settled
        if c.target.sharding != sharding and annotation.like is None and None not in annotation.dims:
            return (
                f"{self.spec(c.target.sharding)} at rest{self.undivided(c.value, sharding)} by "
                f"{with_short_lines(_head(annotation.source))}"
            )
        if annotation.like is not None:
            return f"{self.spec(c.target.sharding)}, as the argument rests that it succeeds"
        words = _head(self.words(annotation.source, c.reader))
        why = (
            ", which does not divide"
            if c.value in self.story.arguments and self.undivided(c.value, sharding)
            else ""
        )
        return f"{self.spec(c.target.sharding)} by {words}{why}"

    def undivided(self, value: Value, requested: Sharding) -> str:
        """Why a value is not stored as requested."""
        sizes = zip(value.shape, requested.dims, strict=True)
        if all(n % shard_count(axes, self.completion.sizes) == 0 for n, axes in sizes):
            return ""
        return f", for {self.spec(requested)} does not divide [{','.join(map(str, value.shape))}]"

    def needed(self, c: Resharded, node: Node, decision: Decision, factors: Factors) -> str:
        """What clashed with an operand's sharding: a dim that must be unsplit, another operand, or a
        result.
        """
        mine = factors.operands[c.place]
        lost = {f: axes for f, axes in _split(mine, c.source.sharding) if {*axes} & {*c.axes}}
        dims = [
            d
            for d, dim in enumerate(mine)
            if {*lost} & {*dim} and any(factors.type_of(f) == UNSPLIT for f in dim)
        ]
        if happens_once(node):
            return f"{node.name}, which is called once, on whole arrays"
        if dims:
            return f"{node.name}, which needs dim {' and '.join(map(str, dims))} unsplit"
        values = list(zip((*node.inputs, *node.outputs), factors.tensors, strict=True))
        known = [
            *(reshard.source.sharding for reshard in decision.reshards),
            *map(self.completion.sharding, node.outputs),
        ]
        for clash in (_held_elsewhere, _split_otherwise):
            for i, ((value, tensor), sharding) in enumerate(zip(values, known, strict=True)):
                result = i >= len(node.inputs)
                if value is not c.value and clash(tensor, sharding, lost, c.axes, result):
                    by = tuple(a for a in sharding.axes if a in c.axes) or sharding.axes
                    if not result:
                        return self.fact(value, sharding, by)
                    return f"its result {self.spec(sharding)}{_by(self.sources(value, sharding, by))}"
        if any(factors.type_of(f) in REDUCTIONS for f in lost):
            return (
                f"{node.name}, which would owe a {factors.type_of(next(iter(lost)))} over {self.axes(c.axes)}"
            )
        return f"{node.name}, which takes it {self.spec(c.target.sharding)}"

    # Reductions and lowerings

    def settled(self, c: Settled) -> str:
        if c.owed is None and not c.carried:
            return f"which it owes over {self.axes(c.axes)} as it comes in"
        if c.owed is None:
            return f"what each iteration leaves owing over {self.axes(c.axes)}"
        also = f"; also {_listed([line_beside(line, self.line) for line in c.also])}" if c.also else ""
        return self.summed(c.axes, *c.owed.origin) + also

    def summed(self, axes: Axes, node: Node, decision: Decision) -> str:
        """What a node, run by this decision, left owed over the axes. A reshard may have put it on others."""
        if "trips" in decision.splits:
            return f"over the trips, split over {self.axes(axes)}"
        here = tuple(a for layout in decision.results for a in layout.pending_axes)
        dims = (self.along(node, decision.operands, over, "over", decision.factors) for over in (axes, here))
        return next(filter(None, dims), "owed in its body")

    def sent(self, c: Sent) -> str:
        return (
            self.along(c.local.node, c.local.operands, c.axes, "along")
            or f"to all devices along {self.axes(c.axes)}"
        )

    def crossed(self, c: Crossed) -> str:
        resting, refined = c.crossing.resting, c.crossing.refinement
        sharding = spec_text(refined.shown(c.crossing.sharding))
        return (
            f"{spec_text(resting.sharding)} on {resting.mesh} against {sharding} on {refined.program}, which "
            "do not fit each other"
        )

    def along(self, node: Node, layouts, axes: Axes, word: str, factors: Factors | None = None) -> str:
        """The dims of the operands that are split over the axes, the reduced ones if there are factors, and
        by whom.
        """
        dims: dict[str, None] = {}
        values: dict[Value, Layout] = {}
        for i, (value, layout) in enumerate(zip(node.inputs, layouts, strict=True)):
            for d, have in enumerate(layout.dims):
                if {*have} & {*axes} and (factors is None or {*factors.operands[i][d]} & {*factors.reduced}):
                    dims[f"dim {d} of {self.name(value)}"] = None
                    values[value] = layout
        own = len({self.name(value) for value in values}) == 1
        sources: dict[str, str] = {}
        for value, layout in values.items():
            sources |= self.sources(value, layout.sharding, axes, own)
        by = _by(sources) or " by no annotation, for speed"
        return f"{word} {_listed(list(dims))}, split{by}" if dims else ""


def _held_elsewhere(
    tensor: TensorFactors, sharding: Sharding, lost: Mapping[str, Axes], axes: Axes, result: bool
) -> bool:
    """Whether a tensor has the axes in dims that do not share factors with the dims that lose them."""
    return any({*have} & {*axes} for f, have in _split(tensor, sharding) if f not in lost)


def _split_otherwise(
    tensor: TensorFactors, sharding: Sharding, lost: Mapping[str, Axes], axes: Axes, result: bool
) -> bool:
    """Whether a tensor has the dims that lose the axes, but splits them differently. Where an operand is
    replicated does not count, because to cut it is free.
    """
    dims = zip(tensor, sharding.dims, strict=True)
    return any(f in lost and have != lost[f] and (have or result) for dim, have in dims for f in dim)


def _place(layout: Layout, axis: str) -> int | None:
    return next((d for d, axes in enumerate(layout.dims) if axis in axes), None)


AS_IT_RESTS = "as it rests"


def _by(sources: Mapping[str, str]) -> str:
    words = dict.fromkeys(sources.values())
    if [*words] == [AS_IT_RESTS]:
        return f" {AS_IT_RESTS}"
    return f" by {' and '.join(words)}" if words else ""


def _split(tensor: TensorFactors, sharding: Sharding) -> Iterator[tuple[str, Axes]]:
    """The factors of the dims of a tensor that are split."""
    return ((f, axes) for dim, axes in zip(tensor, sharding.dims, strict=True) if axes for f in dim)


def _head(source: str) -> str:
    """The argument that an annotation is of, without the path inside it, which is in the value's name
    already.

    >>> _head("in_shardings[0].params['up']"), _head("with_sharding_constraint at model.py:12")
    ('in_shardings[0]', 'with_sharding_constraint at model.py:12')
    """
    return re.sub(r"^(in_shardings\[\d+\]).*", r"\1", source)


def _listed(phrases: list[str]) -> str:
    return (
        as_one(phrases, exact=True)
        if len({*map(form, phrases)}) == 1 and len(phrases) > 2
        else " and ".join(phrases)
    )


def _of_scan(teller: _Teller, node: Node, i: int, value: Value) -> str:
    consts, carries = _jax.scan_counts(node.params)
    outer = teller.name(node.inputs[i])
    return (
        outer
        if i < consts
        else f"the carry {array_text(value.aval)}"
        if i < consts + carries
        else f"an iteration's {outer}"
    )


def _of_while(teller: _Teller, node: Node, i: int, value: Value) -> str:
    cond, body = node.params["cond_nconsts"], node.params["body_nconsts"]
    count, start = (cond, 0) if value in node.bodies[0].inputs else (body, cond)
    return teller.name(node.inputs[start + i]) if i < count else f"the carry {array_text(value.aval)}"


_INNER = {
    "cond": lambda teller, node, i, value: teller.name(node.inputs[i + 1]),
    "scan": _of_scan,
    "shard_map": lambda teller, node, i, value: f"a shard of {teller.name(node.inputs[i])}",
    "while": _of_while,
}
_TOLD = {
    Crossed: _Teller.crossed,
    Resharded: _Teller.resharded,
    Sent: _Teller.sent,
    Settled: _Teller.settled,
}

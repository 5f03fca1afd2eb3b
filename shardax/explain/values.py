"""The sharding of every value of the global program: a table by source line, and the chain of facts behind
each.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardax.completion.complete import Origin
from shardax.explain.facts import Facts
from shardax.explain.tables import Group, Row, Table, plain
from shardax.graph.graph import Node, Value
from shardax.ledger.collectives import array_bytes, array_text
from shardax.ledger.lines import assigned, code, is_at, line_text, with_short_lines
from shardax.ledger.words import as_one, form, spec_text, times
from shardax.partition.decisions import Decision, Decisions
from shardax.sharding import Sharding, shard_count


@dataclass(frozen=True)
class Intermediate:
    """A value that a line of the user's code makes: by which primitive, of what type and how many bytes in
    all, how it is laid out.
    """

    line: str
    primitive: str
    array: str
    nbytes: int
    sharding: Sharding
    shards: int = 1


def intermediates(plan: Facts) -> list[Intermediate]:
    """Every value that the program makes, those of loop bodies included, in program order, in the sharding in
    which it is made; numbers and annotations left out.
    """
    made = made_in(plan.decisions)
    return [
        Intermediate(
            node.line or plan.line,
            node.name,
            array_text(value.aval),
            array_bytes(value.aval),
            shown(plan, made.get(value) or plan.values.sharding(value)),
            shard_count((made.get(value) or plan.values.sharding(value)).axes, plan.values.sizes),
        )
        for node in plan.graph.walk()
        for value in node.outputs
        if value.shape and not _is_annotation(node)
    ]


def shardings(plan: Facts) -> Iterator[Table]:
    """How the values of each line are laid out, alike ones once, and what led to that: the annotation at the
    end of each chain.
    """
    if plan.graph:
        story = Story(plan)
        groups = tuple(_line_group(line, values, story) for line, values in story.by_line().items())
        yield Table(
            "Values, by the line that makes them: how they are sharded, and why",
            groups,
            ("values", "the largest"),
        )


def _line_group(line: str, values: Sequence[Value], story: "Story") -> Group:
    alike: dict[tuple[Sharding, Sharding, tuple[str, ...]], list[Value]] = {}
    for value in values:
        shardings = _bare(story.made(value)), _bare(story.plan.sharding(value))
        alike.setdefault((*shardings, tuple(map(form, story.causes(value)))), []).append(value)
    dearest = sorted(alike.items(), key=lambda item: -sum(v.nbytes for v in item[1]))
    rows = [_row(made, proposed, group, story) for (made, proposed, _), group in dearest]
    return Group(line_text(line) or "(unknown line)", tuple(rows), code(line))


def _row(made: Sharding, proposed: Sharding, values: Sequence[Value], story: "Story") -> Row:
    """Values that are made in one sharding, for which completion proposed one, by alike annotations."""
    largest = max(values, key=lambda v: v.nbytes)
    causes = zip(*map(story.causes, values), strict=True)
    by = ", ".join(dict.fromkeys(as_one(list(dict.fromkeys(names))) for names in causes))
    over = "" if made == proposed else f", chosen over {spec_text(proposed)}"
    text = f"{spec_text(made)}{over}{by and f'  by {by}'}"
    return Row(text, (str(len(values)), array_text(largest.aval)))


def made_in(decisions: Decisions | None) -> dict[Value, Sharding]:
    """The sharding in which each value is made in the program that runs, which completion's only proposes."""
    return {
        value: layout.sharding
        for value, (_, decision, i) in makers(decisions)
        for layout in decision.results[i : i + 1]
    }


def makers(decisions: Decisions | None) -> Iterator[tuple[Value, tuple[Node, Decision, int]]]:
    """For each value the node that makes it, as which result, by which decision; those of bodies included."""
    for node, decision in decisions.pairs() if decisions else ():
        yield from ((value, (node, decision, i)) for i, value in enumerate(node.outputs))
        for body in decision.bodies:
            yield from makers(body)


def shown(plan: Facts, sharding: Sharding) -> Sharding:
    """In the axes that a person named."""
    return plan.refinement.shown(sharding) if plan.refinement else sharding


def _bare(sharding: Sharding) -> Sharding:
    """A sharding without the unsplit dims at its end, so that values of several ranks count as alike."""
    dims = sharding.dims
    while dims and not dims[-1]:
        dims = dims[:-1]
    return Sharding(dims)


def shardings_text(plan: Facts) -> str:
    """Every primitive: under each line what it makes, alike values once."""
    lines: dict[str, Counter] = {}
    for made in intermediates(plan):
        lines.setdefault(made.line, Counter())[made] += 1
    groups = []
    for line, counts in lines.items():
        rows = (
            Row(made.primitive, (times(n) + made.array, spec_text(made.sharding)))
            for made, n in counts.items()
        )
        groups.append(Group(line_text(line) or "(unknown line)", tuple(rows), code(line)))
    return plain([Table("Values, by the line that makes them", tuple(groups), ("", ""), 2)]) if groups else ""


class Story:
    """Finds values, and tells where their shardings come from."""

    def __init__(self, plan: Facts):
        self.plan = plan
        self.completion = plan.values
        self.places = list(plan.arguments())
        self.arguments = dict(zip(plan.graph.inputs, self.places, strict=False))
        self.closed_over = set(plan.graph.inputs[len(self.places) :])
        self.nodes = list(plan.graph.walk())
        self.made_in = made_in(plan.decisions)
        self.roots: dict[tuple[Value, int], Origin | None] = {}
        self.annotated = {n.inputs[0]: n.outputs[0] for n in reversed(self.nodes) if _is_annotation(n)}
        self.makers = {value: node for node in self.nodes for value in node.outputs}
        self.owners = {value: node for node in self.nodes for body in node.bodies for value in body.inputs}

    def made(self, value: Value) -> Sharding:
        """The sharding in which a value is made, as a person reads it."""
        return shown(self.plan, self.made_in.get(value) or self.completion.sharding(value))

    def example(self) -> str:
        return self.places[0].named if self.places else "0/w"

    def find(self, what: str) -> list[Value]:
        """The argument itself where there is no annotation of it, else the annotated value: the program
        computes with that.
        """
        named = [v for v, place in self.arguments.items() if what in (place.path, place.named)]
        if named:
            return [self.inside(v) for v in named]
        return [
            v
            for node in self.nodes
            if not _is_annotation(node) and _answers(node, what)
            for v in node.outputs
            if v.shape
        ]

    def inside(self, argument: Value) -> Value:
        return self.annotated.get(argument, argument)

    def insides(self) -> dict[int, Value]:
        """What the program computes with, for the number of each argument."""
        return {i: self.inside(argument) for i, argument in enumerate(self.arguments)}

    def root(self, value: Value, dim: int) -> Origin | None:
        """The annotation that led completion to the axes of a dim."""
        way, at = [], (value, dim)
        while at not in self.roots and at not in way:
            way.append(at)
            origin = self.completion.origin(*at)
            if origin is None or origin.value is None:
                self.roots[at] = origin
            else:
                at = self.completion.learned_from(origin, *at)
        origin = self.roots.get(at)
        self.roots.update(dict.fromkeys(way, origin))
        return origin

    def line(self, value: Value) -> str:
        return self.makers[value].line if value in self.makers else ""

    def by_line(self) -> dict[str, list[Value]]:
        """Every value that the program makes, numbers and annotations left out, by its line, in program
        order.
        """
        lines: dict[str, list[Value]] = {}
        for node in self.nodes:
            if not _is_annotation(node):
                lines.setdefault(node.line or self.plan.line, []).extend(v for v in node.outputs if v.shape)
        return {line: values for line, values in lines.items() if values}

    def causes(self, value: Value) -> tuple[str, ...]:
        """The annotations that led completion to the dims of a value, in their order."""
        dims = (d for d, axes in enumerate(self.completion.sharding(value).dims) if axes)
        origins = (self.root(value, d) for d in dims)
        return tuple(dict.fromkeys(self.called(o.source) if o else "the program" for o in origins))

    def called(self, source: str) -> str:
        """An annotation's words; that of an argument by the path of the argument."""
        head, _, rest = source.partition(" rests in it")
        number = head.removeprefix("argument ")
        if not rest and head != source and number.isdecimal() and int(number) < len(self.places):
            return self.places[int(number)].named
        keys = (
            re.findall(r"\w+", source.removeprefix("in_shardings"))
            if source.startswith("in_shardings")
            else []
        )
        named = (place.named for place in self.places if keys and place.path == "/".join(keys))
        return next(named, with_short_lines(source))

    def tell(self, value: Value, count: int = 1) -> str:
        """The story of a value; `count` values have the same line, type and sharding, and it stands for
        all.
        """
        sharding = self.plan.sharding(value)
        lines = [
            f"{self.name(value)}: {spec_text(sharding)}"
            + f" (and {count - 1} more there alike)" * (count > 1)
        ]
        for d, axes in enumerate(sharding.dims):
            if axes:
                lines.append(f"  dim {d} is split over {', '.join(axes)}:")
                lines += [f"    {fact}" for fact in self.facts(value, d)]
        return "\n".join(lines if len(lines) > 1 else [*lines, "  no annotation asks that it be split"])

    def facts(self, value: Value, dim: int) -> Iterator[str]:
        """A line of text for each line of the user's code that the axes came by, the last for the
        annotation.
        """
        subject = "it"
        chain = self.completion.why(value, dim)
        steps = [origin for origin in chain if origin.value is not None]
        for line, origins in itertools.groupby(steps, lambda o: o.node.line if o.node else None):
            *_, last = origins = list(origins)
            primitives = ", ".join(dict.fromkeys(o.node.name for o in origins if o.node))
            assert last.value
            yield (
                f"{line_text(line or '') or 'an unknown line'} ({primitives}) ties {subject} to "
                f"{self.name(last.value)}"
            )
            subject = "that"
        yield from (self.origin_text(told.source) for told in chain[len(steps) :])

    def origin_text(self, source: str) -> str:
        """Completion counts arguments, people name them."""
        head, _, rest = source.partition(" rests in it")
        number = head.removeprefix("argument ")
        if not rest and head != source and number.isdecimal() and int(number) < len(self.places):
            return f"argument {self.places[int(number)].named} rests so"
        return f"{with_short_lines(source)} says so" if " " not in source or " at " in source else source

    def name(self, value: Value) -> str:
        array = array_text(value.aval)
        if value in self.arguments:
            return f"argument {self.arguments[value].named} {array}"
        if value in self.closed_over:
            return f"an array that the function closes over, {array}"
        node = self.makers.get(value)
        if node is None:
            return (
                f"{array} in the body of {_place(self.owners[value])}"
                if value in self.owners
                else f"a constant {array}"
            )
        if _is_annotation(node):
            return self.name(node.inputs[0])
        variable = assigned(node.line)
        return f"{f'{variable} ' if variable else ''}{array} at {line_text(node.line) or 'an unknown line'}"


def _answers(node: Node, what: str) -> bool:
    """Whether a node is at the line, or makes the variable or the `checkpoint_name`, that a user names."""
    if ":" in what:
        return is_at(node.line, what)
    return what == (node.params.get("name") if node.name == "name" else assigned(node.line))


def _place(node: Node) -> str:
    return f"{node.name} at {line_text(node.line) or 'an unknown line'}"


def _is_annotation(node: Node) -> bool:
    return node.name in ("annotate", "sharding_constraint")

"""Rules as values: which dims of a primitive's operands and results may be split alike, read like einsum.

    "b m k+, b k+ n -> b m n"

A letter is a *factor*; the same letter on several tensors means that they may be split alike. A mark gives
its type:

    k        kept: each shard computes its part, nothing is sent
    k+       splitting it leaves a pending sum            k:max, k:min   a pending maximum, minimum
    k!       unsplit: never split. A dim that has it on both sides may be split before and after: its axes
             go to another dim
    h~       windowed: dims of different sizes that are split over the same axes, each in blocks of its own;
             what a shard lacks its neighbours send (a mark may follow: h~+; the lowering masks the padding)
    (h w)    a compound dim: factors major to minor, as a reshape makes them
    ...      one kept factor for each remaining dim, the same on every tensor that has it

A dim of size one may be written 1; it is never split. Bound to shapes, h~ is one factor for each size that it
has: h~16, h~14.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from types import MappingProxyType

Shape = tuple[int, ...]
DimFactors = tuple[str, ...]  # the factors of one dim, major to minor; usually one
TensorFactors = tuple[DimFactors, ...]

KEEP, UNSPLIT = "keep", "unsplit"
REDUCTIONS = ("sum", "max", "min")
_MARKS = {"": KEEP, "+": "sum", ":max": "max", ":min": "min", "!": UNSPLIT}
_TOKEN = re.compile(r"\(|\)|\.\.\.|,|->|[A-Za-z_][A-Za-z_0-9]*~?(?:\+|!|:max|:min)?|1|[^\s,()]+")
_FACTOR = re.compile(r"([A-Za-z_][A-Za-z_0-9]*~?)(\+|!|:max|:min|)")


@dataclass(frozen=True)
class Rule:
    """A parsed rule. `types` holds the factors that are not plainly kept; it prints itself back as text.

    `sizes`: of factors whose size no shape tells; text has no word for it.
    """

    operands: tuple[tuple[object, ...], ...]
    results: tuple[tuple[object, ...], ...]
    types: tuple[tuple[str, str], ...]
    text: str = field(compare=False)
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        return self.text


@dataclass(frozen=True)
class Factors:
    """A rule bound to shapes: the factors of every dim, and the size and type of every factor."""

    operands: tuple[TensorFactors, ...]
    results: tuple[TensorFactors, ...]
    sizes: Mapping[str, int]
    types: Mapping[str, str]

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """The factors over which the results are reduced."""
        return tuple(f for f, type_ in self.types.items() if type_ in REDUCTIONS)

    @cached_property
    def tensors(self) -> tuple[TensorFactors, ...]:
        """The factors of the operands, then of the results."""
        return self.operands + self.results

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The kept factors, windows aside, that every operand and result has: the batch of a product."""
        tensors = [{f for dim in tensor for f in dim} for tensor in self.tensors]
        kept = (f for f in self.sizes if self.type_of(f) == KEEP and "~" not in f)
        return tuple([f for f in kept if all(f in tensor for tensor in tensors)])

    @cached_property
    def has_diagonals(self) -> bool:
        """Whether a factor stands twice on one tensor."""
        each = ([f for dim in tensor for f in dim] for tensor in self.tensors)
        return any(len(set(factors)) < len(factors) for factors in each)

    @cached_property
    def all_meet(self) -> bool:
        """Whether any two factors stand together on some tensor, as they mostly do."""
        each = [{f for dim in tensor for f in dim} for tensor in self.tensors]
        return all(any(pair <= tensor for tensor in each) for pair in map(set, combinations(self.sizes, 2)))

    @cached_property
    def window_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of windowed factors that are split over the same axes."""
        groups: dict[str, list[str]] = {}
        for factor in self.sizes:
            if "~" in factor:
                groups.setdefault(base_name(factor), []).append(factor)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def restored(self) -> frozenset[str]:
        """The unsplit factors that both operands and results have: split before and after, not on the way."""
        sides = (self.operands, self.results)
        before, after = ({base_name(f) for tensor in side for dim in tensor for f in dim} for side in sides)
        return frozenset(
            f for f in self.sizes if base_name(f) in before & after and self.type_of(f) == UNSPLIT
        )

    def type_of(self, factor: str) -> str:
        return self.types.get(factor, KEEP)


def base_name(factor: str) -> str:
    """The factor as its rule names it: windowed ones of several sizes have one name.

    >>> base_name("h~16"), base_name("k")
    ('h~', 'k')
    """
    name, wave, _ = factor.partition("~")
    return name + wave


@cache
def parse(text: str) -> Rule:
    """Parses a rule; errors quote the rule and the offending word.

    >>> parse("m k+, k+ n -> m n").types
    (('k', 'sum'),)
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise complain(
            text, "->", "a rule has operands, an arrow '->' and results, such as 'm k+, k+ n -> m n'"
        )
    types: dict[str, str] = {}
    operands, results = (_parse_side(side, text, types) for side in (left, right))
    for tensor in results:
        for factor in _factors_of(tensor):
            if types.get(factor) in REDUCTIONS:
                raise complain(
                    text,
                    factor,
                    "a reduced factor cannot appear in a result: take it out there, or off its mark",
                )
    return Rule(operands, results, tuple((f, k) for f, k in types.items() if k != KEEP), text)


def complain(text: str, word: str, why: str) -> ValueError:
    """An error that quotes the rule and the offending word."""
    return ValueError(f"rule {text!r}: at {word!r}: {why}")


def _parse_side(side: str, text: str, types: dict[str, str]) -> tuple[tuple[object, ...], ...]:
    tensors: list[list[object]] = [[]]
    group: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            tensors[-1].append(tuple(group))
            group = None
        elif token == "," and group is None:
            tensors.append([])
        elif token == "..." and group is None:
            if "..." in tensors[-1]:
                raise complain(text, token, "a tensor has at most one: name its other dims")
            tensors[-1].append("...")
        elif token == "1" and group is None:
            tensors[-1].append(())
        else:
            factor = _parse_factor(token, text, types)
            if group is None:
                tensors[-1].append((factor,))
            elif "~" in factor:
                raise complain(
                    text, token, "a windowed factor must have a dim to itself: take it out of the parentheses"
                )
            else:
                group.append(factor)
    if group is not None:
        raise complain(text, "(", "this parenthesis is not closed: a compound dim is written (h w)")
    if tensors == [[]] and not side.strip():
        return ((),)
    return tuple(map(tuple, tensors))


def _parse_factor(token: str, text: str, types: dict[str, str]) -> str:
    match = _FACTOR.fullmatch(token)
    if match is None:
        expected = (
            "expected a factor (a name and a mark: + ! :max :min or none), '...', '1' or a group such as "
            "(h w)"
        )
        raise complain(
            text, token, expected if token != "->" else "a rule has one arrow: separate tensors by commas"
        )
    name, mark = match.groups()
    if types.setdefault(name, _MARKS[mark]) != _MARKS[mark]:
        before, now = (
            f"marked as {type_}" if type_ != KEEP else "not marked" for type_ in (types[name], _MARKS[mark])
        )
        raise complain(
            text,
            token,
            f"the factor {name!r} was {before} before, and is {now} here: write it alike everywhere",
        )
    return name


def _factors_of(tensor) -> Iterator[str]:
    for dim in tensor:
        if dim != "...":
            yield from dim


@cache
def bind(rule: Rule, in_shapes: tuple[Shape, ...], out_shapes: tuple[Shape, ...]) -> Factors:
    """Binds a rule to shapes: expands `...`, finds the size of every factor, checks that they agree.

    >>> bind(parse("... k+ -> ..."), ((2, 3, 5),), ((2, 3),)).sizes["k"]
    5
    """
    if not in_shapes and rule.operands == ((),):
        rule = replace(rule, operands=())  # no text before the arrow: one scalar, or nothing at all
    if not out_shapes and rule.results == ((),):
        rule = replace(rule, results=())
    for what, tensors, shapes in (
        ("operands", rule.operands, in_shapes),
        ("results", rule.results, out_shapes),
    ):
        if len(tensors) != len(shapes):
            raise complain(
                rule.text, "->", f"it has {len(tensors)} {what}, the equation has {len(shapes)}: name each"
            )
    operands = tuple(_expand(t, s, rule.text) for t, s in zip(rule.operands, in_shapes, strict=True))
    results = tuple(_expand(t, s, rule.text) for t, s in zip(rule.results, out_shapes, strict=True))
    sizes = _sizes(operands + results, in_shapes + out_shapes, rule)
    types = dict(rule.types)
    types = {f: types[base_name(f)] for f in sizes if base_name(f) in types}
    return Factors(operands, results, MappingProxyType(sizes), MappingProxyType(types))


def _dim_text(dim) -> str:
    """A parsed dim as it was typed, marks aside."""
    if dim == "...":
        return dim
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1"


def _expand(tensor, shape: Shape, text: str) -> TensorFactors:
    if "..." in tensor:
        at = tensor.index("...")
        count = len(shape) - (len(tensor) - 1)
        tensor = tensor[:at] + tuple((f"_{i}",) for i in range(max(count, 0))) + tensor[at + 1 :]
    if len(tensor) != len(shape):
        out = "name each dim, or write '...' for those that are merely carried along"
        raise complain(
            text,
            " ".join(map(_dim_text, tensor)),
            f"it names {len(tensor)} dims, the shape is {shape}: {out}",
        )
    return tuple(
        (f"{dim[0]}{n}",) if dim and dim[0][-1] == "~" else dim for dim, n in zip(tensor, shape, strict=True)
    )


def _sizes(tensors, shapes, rule: Rule) -> dict[str, int]:
    """The size of every factor: from dims of one factor, then, as often as that tells more, from groups with
    one unknown.
    """
    sizes, text = dict(rule.sizes), rule.text
    groups = []
    for dim, n in (
        (d, n)
        for tensor, shape in zip(tensors, shapes, strict=True)
        for d, n in zip(tensor, shape, strict=True)
    ):
        if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
            why = (
                f"this factor has size {sizes[dim[0]]} in one place and {n} in another: give dims of two "
                "sizes two names"
            )
            raise complain(text, dim[0], why)
        if len(dim) != 1:
            groups.append((dim, n))
    before = -1
    while before != len(sizes):
        before = len(sizes)
        for dim, n in groups:
            unknown = [f for f in dim if f not in sizes]
            known = math.prod(sizes[f] for f in dim if f in sizes)
            if len(unknown) == 1 and known and n % known == 0:
                sizes[unknown[0]] = n // known
    for dim, n in groups:
        if any(f not in sizes for f in dim) or math.prod(sizes[f] for f in dim) != n:
            raise complain(
                text,
                f"({' '.join(dim)})" if dim else "1",
                f"its factors do not multiply to the dim's size {n}",
            )
    return sizes

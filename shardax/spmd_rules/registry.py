"""Where rules are registered, and what a local lowering may know. Built-in rules use the same `register_rule`
as users do.

A registration has a rule, how the primitive is written on shards, and facts that the planner and the
estimates read. Nothing else knows primitives by their names, so those of users count as ours do.

  rule           what may be split: text (see `rule.py`), or a function of the node that returns text, for
                 what depends on parameters
  local          how the primitive is written on shards, where binding it on them as it is would not do
  passes         through which operands a pending reduction may stay pending, see `LINEAR` and `MOVES`
  in_place       which operand is a table, and what is read of it or written to it. The indexed dims of tables
                 are not gathered; what is written to a table takes its memory, and no more of it moves
  sends          the collectives that `local` makes: over which axes, of how many bytes
  ways           which splits it takes, where only a callback knows
  flops          the FLOPs that a device does. What has some is split as far as may be, and is bound by the
                 chip's peak too
  batch          how many items it computes alike; of too few a compiler may make slow code
  made_anywhere  of scalars it makes a value of which every device can make any part for nothing
  fuses          what XLA computes in one pass with it: what makes its operands, what reads its result
  reads          how much of its operands it reads from memory
  accumulates    to which operands it only adds, or of which it takes the maximum with something else, so that
                 iterations of a loop that carries such an operand do not wait for each other
  commutes       its operands may be exchanged
  of_parts       it puts together or takes apart along some dims, and passes the others through
  anew           what it makes is another value each time, though the operands are the same
  once           what it does happens once, for all devices, which all must run it
  casts          its result is its operand, in another type or precision
  heavy          it computes much for each element, as random bits do

Facts follow from these: `looks_up`, that the payload is read of the table, whose contraction an all_to_all
may spare; `has_flops`, that a node multiplies; `order`, that elements stay and dims move; `adds`, that a
result is the sum of its operands.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from shardax import _jax
from shardax.annotations.explicit import SHARDING_PARAMS
from shardax.cost.network import Message
from shardax.graph.graph import Node
from shardax.ledger.collectives import KINDS
from shardax.reshard.run import axis_position
from shardax.sharding import Axes, AxisSizes, Layout, Padding, shard_count
from shardax.spmd_rules.claims import noting, require_operands, require_placed
from shardax.spmd_rules.rule import KEEP, REDUCTIONS, Factors, Rule, bind, complain, parse
from shardax.validation import is_integer, is_number, require, require_function

RuleText = str | Callable[[Node], str | Rule]


@dataclass(frozen=True)
class Passes:
    """The result is pending over an axis, with a kind of `reductions`, if exactly the operands numbered
    `operands` are.

    All of these operands are pending, or none is. The other operands are the same on every device along that
    axis.
    """

    reductions: tuple[str, ...]
    operands: tuple[int, ...]


@_jax.boundary
def LINEAR(*operands: int) -> Passes:
    """f(Σa, Σb) = Σ f(a, b), the other operands held fixed: add is LINEAR(0, 1), mul is LINEAR(0) and also
    LINEAR(1).
    """
    _check_operands(operands, "LINEAR")
    return Passes(("sum",), operands)


@_jax.boundary
def MOVES(*operands: int) -> Passes:
    """The result holds only elements of these operands, whatever their values are, so any reduction may
    wait.
    """
    _check_operands(operands, "MOVES")
    return Passes(("sum", "max", "min"), operands)


def _check_operands(operands, what: str) -> None:
    for i in operands or (None,):
        require(is_integer(i, 0), f"an operand of {what}", i, "the number of an operand, such as 0")


PassesOf = Sequence[Passes] | Callable[[Node], Sequence[Passes]]


@dataclass(frozen=True, slots=True)
class Split:
    """How one factor is split: the axes, major to minor, and the padded size. No axes: unsplit, and padded to
    its own size.
    """

    axes: Axes
    padded: int


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Local:
    """What a local lowering may know: the node, and the layouts of its operands and results.

    `splits` has the Split of every factor that is split. The shards that the lowering takes have the layouts
    `operands`, those that it returns the layouts `results`. These already say what is pending over the axes
    of reduced factors, so the lowering sends nothing for that.
    """

    node: Node
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    splits: Mapping[str, Split]
    sizes: AxisSizes

    @property
    def params(self) -> dict[str, Any]:
        return self.node.params

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """The shape of operand i's shard."""
        return self.operands[i].local_shape(self.sizes)

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """The shape of result i's shard."""
        return self.results[i].local_shape(self.sizes)

    @property
    def shapes(self) -> tuple[Shapes, Shapes]:
        """Those of the operands' shards, and of the results'."""
        ins, outs = (tuple(s.local_shape(self.sizes) for s in side) for side in (self.operands, self.results))
        return ins, outs

    def count(self, axes: Axes) -> int:
        return shard_count(axes, self.sizes)

    def index(self, axes: Axes):
        """This device's position along `axes`, major to minor: an int32 scalar, 0 where there are none."""
        return axis_position(axes, self.sizes)

    def start(self, layout: Layout, dim: int):
        """The global position of the first element of this device's shard along `dim`."""
        block = layout.local_shape(self.sizes)[dim]
        return lax.mul(self.index(layout.dims[dim]), np.int32(block)) if layout.dims[dim] else 0

    def bind(self, *shards, **params):
        """Binds the node's primitive on shards, with some parameters replaced. Returns a list of results.

        Parameters that hold global shardings (on meshes with Explicit axes) mean nothing on shards: they are
        dropped.
        """
        own_params = {name: None if name in SHARDING_PARAMS else p for name, p in self.node.params.items()}
        out = self.node.primitive.bind(*shards, **{**own_params, **params})
        return list(out) if self.node.primitive.multiple_results else [out]

    def mask(self, i: int, shard, fill, dims: Iterable[int] | None = None):
        """Operand i's shard with `fill` in the padding of `dims` (all of them by default)."""
        return mask_padding(shard, self.operands[i], self.node.inputs[i].shape, fill, self.sizes, dims)


LocalLowering = Callable[..., Sequence[Any]]
"""`lowering(local, *shards)` writes a primitive on shards, inside shard_map; it returns one shard for each
result.
"""


def mask_padding(
    shard, layout: Layout, shape: tuple[int, ...], fill, sizes: AxisSizes, dims: Iterable[int] | None = None
):
    """`shard` with `fill` instead of the garbage at the positions past the true `shape` along `dims`."""
    local = layout.local_shape(sizes)
    for d in range(len(shape)) if dims is None else dims:
        if layout.padded[d] != shape[d]:
            first = lax.mul(axis_position(layout.dims[d], sizes), np.int32(local[d]))
            inside = lax.broadcasted_iota("int32", local, d) < lax.sub(np.int32(shape[d]), first)
            shard = lax.select(inside, shard, lax.full_like(shard, fill))
    return shard


Ways = Callable[[Iterator[Local], Padding], Iterator[Local]]
"""`ways(candidates, padding)` gives those candidates that can run, with other layouts of operands and results
where need be.
"""


Flops = Callable[[Mapping[str, Any], Shapes, Shapes], float | None]
"""`flops(params, in_shapes, out_shapes)` gives the FLOPs that a device does whose operands and results have
these shapes, those of shards; None where an equation has no products. The parameters are those of the node,
or of an equation on shards."""
Batch = Callable[[Mapping[str, Any], Shapes, Shapes], int | None]
"""`batch(params, in_shapes, out_shapes)` gives the items of a batch, of shards; None where it makes no
difference how many there are."""

Fuses = Literal["none", "transposes", "operands", "all"]
Reads = Literal["all", "part", "none", "view"]
Accumulates = tuple[str, tuple[int, ...]]
"""A reduction, "sum", "max" or "min", and for each operand in which it holds its place: the result is that
operand, reduced with something that is made of the others alone."""

Sends = Callable[[Local], Iterable[Message | tuple[str, Axes, float] | float]]


def _is_message(given: Any, sizes: AxisSizes) -> bool:
    if not isinstance(given, tuple):
        return is_number(given, 0)
    kind, axes, nbytes = given[:3] if len(given) > 2 else (None, None, None)
    return kind in KINDS.values() and isinstance(axes, tuple) and {*axes} <= {*sizes} and is_number(nbytes, 0)


@dataclass(frozen=True)
class Entry:
    """One registration."""

    name: str
    rule: RuleText
    local: LocalLowering | None = None
    passes: PassesOf = ()
    in_place: tuple[int, int] | None = None
    sends: Sends | None = None
    ways: Ways | None = None
    flops: Flops | None = None
    batch: Batch | None = None
    made_anywhere: bool = False
    fuses: Fuses = "none"
    reads: Reads = "all"
    accumulates: Accumulates | None = None
    commutes: bool = False
    of_parts: bool = False
    anew: bool = False
    once: bool = False
    casts: bool = False
    heavy: bool = False
    as_suggested: bool = False

    def factors(self, node: Node) -> Factors:
        try:
            rule = self.rule_of(node)
            factors = bind(rule, node.in_shapes, node.out_shapes)
            self.require_fitting(rule, factors)
            return factors
        except ValueError as error:
            raise ValueError(f"{at(node)}: {error}") from None

    def rule_of(self, node: Node) -> Rule:
        """The rule, as the node's parameters have it."""
        if isinstance(self.rule, str):
            return parse(self.rule)
        with noting(lambda: f"the function that is the rule of {at(node)}"):
            rule = self.rule(node)
        require(isinstance(rule, str | Rule), "what the function that is its rule gives", rule, _RULE_TEXT)
        return parse(rule) if isinstance(rule, str) else rule

    def require_fitting(self, rule: Rule, factors: Factors | None = None) -> None:
        """Where the rule is a function, with what `...` and windowed factors are."""
        if not self.local:
            require_placed(rule, factors or rule)
        require_operands(rule, () if callable(self.passes) else self.passes, self.in_place)

    def factors_in_place(self, factors: Factors) -> frozenset[str]:
        """The factors of the table's indexed dims."""
        if self.in_place is None:
            return frozenset()
        table, payload = ({f for dim in factors.tensors[i] for f in dim} for i in self.in_place)
        return frozenset(table - payload)

    @property
    def looks_up(self) -> bool:
        """Whether the payload is read of the table, and not written to it."""
        return self.in_place is not None and self.in_place[1] == -1

    def passes_of(self, node: Node) -> Sequence[Passes]:
        if not callable(self.passes):
            return self.passes
        with noting(lambda: f"the function `passes` of {at(node)}"):
            returned = self.passes(node)
        if not _are_passes(returned) or any(i >= len(node.inputs) for p in returned for i in p.operands):
            words = f"a sequence of LINEAR(...) and MOVES(...), of operands below {len(node.inputs)}"
            require(False, f"what `passes` of {at(node)} gives", returned, words)
        return returned

    def order(self, node: Node) -> list[int] | None:
        """Where the result has all elements of the one operand and nothing else, each at the same place along
        its dims: the dims of the operand in the order of those of the result, all but those of size one.
        """
        if (len(node.inputs), len(node.outputs)) != (1, 1) or MOVES(0) not in self.passes_of(node):
            return None
        factors = self.factors(node)
        before, after = (
            [(dim, d) for d, (dim, n) in enumerate(zip(dims, shape, strict=True)) if n != 1]
            for dims, shape in zip(
                (*factors.operands, *factors.results), (*node.in_shapes, *node.out_shapes), strict=True
            )
        )
        places = {dim: d for dim, d in before}
        kept = all(factors.type_of(f) == KEEP and "~" not in f for dim in places for f in dim)
        if not kept or len(places) != len(before) or sorted(dim for dim, _ in after) != sorted(places):
            return None
        return [places[dim] for dim, _ in after]

    def transposes(self, node: Node) -> bool:
        """Whether a node of it only puts dims in another order."""
        order = self.order(node)
        return order is not None and order != sorted(order)

    def is_fused(self, reader: "Entry", node: Callable[[], Node]) -> bool:
        """Whether its result is never stored, where only a node of `reader` reads it."""
        if self.fuses == "transposes":
            return reader.transposes(node())
        return self.fuses == "all" and not self.flops and reader.fuses in ("operands", "all")

    def is_view(self, operand: Sequence[int], result: Sequence[int]) -> bool:
        """Whether a result of this shape is in memory what the operand in its place, of that one, is."""
        if self.reads == "none":
            return tuple(operand) == tuple(result)
        same = [n for n in operand if n != 1] == [n for n in result if n != 1]
        return self.reads == "view" and same

    def sent(self, local: Local) -> list[Message]:
        """What one device sends in each collective of the lowering."""
        if self.sends is None:
            return []
        with noting(lambda: f"the function `sends` of {at(local.node)}"):
            returned: Any = self.sends(local)
            returned = list(returned) if isinstance(returned, Iterable) else returned
        if not isinstance(returned, list) or not all(_is_message(m, local.sizes) for m in returned):
            require(
                False,
                f"what `sends` of {at(local.node)} gives",
                returned,
                "(kind, axes, bytes) of each collective, such as "
                f"[('all_gather', {(*local.sizes,)[:1]}, 4096)], or its bytes alone",
            )
        return [Message(*m) if isinstance(m, tuple) else Message("ppermute", (), m) for m in returned]

    def has_flops(self, node: Node) -> bool:
        """Whether a node multiplies: its products are split as far as may be."""
        return self._checked_flops(node.params, node.in_shapes, node.out_shapes, lambda: at(node)) is not None

    def flops_of(self, local: Local) -> float:
        """The FLOPs that one device does, 0 where there are no products."""
        return self.flops_or_none(local) or 0.0

    def flops_or_none(self, local: Local) -> float | None:
        """As `flops_of`, but None where there are no products."""
        if self.flops is None:
            return None
        return self._checked_flops(local.params, *local.shapes, lambda: at(local.node))

    def batch_of(self, local: Local) -> int | None:
        """How many items one device has of a batch; None where it makes no difference."""
        if self.batch is None:
            return None
        with noting(lambda: f"the function `batch` of {at(local.node)}"):
            returned = self.batch(local.params, *local.shapes)
        valid = returned is None or is_integer(returned, 0)
        require(valid, f"what `batch` of {at(local.node)} gives", returned, "a number of items, or None")
        return returned

    def flops_at(self, eqn) -> float | None:
        """Those of an equation of a local program; None where it has no products."""
        if self.flops is None:
            return None
        ins, outs = (tuple(tuple(v.aval.shape) for v in side) for side in (eqn.invars, eqn.outvars))
        return self._checked_flops(
            eqn.params, ins, outs, lambda: f"{self.name} at {_jax.user_line(eqn.source_info)}"
        )

    def _checked_flops(
        self, params: Mapping[str, Any], ins: Shapes, outs: Shapes, where: Callable[[], str]
    ) -> float | None:
        if self.flops is None:
            return None
        with noting(lambda: f"the function `flops` of {where()}"):
            returned = self.flops(params, ins, outs)
        if not (returned is None or is_number(returned, 0)):
            require(
                False,
                f"what `flops` of {where()} gives",
                returned,
                "the FLOPs that one device does, such as 2 * m * n * k",
            )
        return None if returned is None else float(returned)

    def picked(self, candidates: Iterator[Local], node: Node, padding: Padding) -> Iterable[Local]:
        """Those of the candidates that the primitive takes."""
        assert self.ways
        with noting(lambda: f"the function `ways` of {at(node)}"):
            returned = self.ways(candidates, padding)
        require(
            isinstance(returned, Iterable),
            f"what `ways` of {at(node)} gives",
            returned,
            "those of the candidates that can run",
        )
        return returned


def at(node: Node) -> str:
    """A node, in the words of errors."""
    return f"{node.name} at {node.line or 'an unknown line'}"


def happens_once(node: Node) -> bool:
    """Whether what a node does happens once, for all devices."""
    return node.name in RULES and RULES[node.name].once


def adds(node: Node) -> bool:
    """Whether the result of a node is the sum of its operands."""
    entry = RULES.get(node.name)
    if entry is None or not entry.accumulates:
        return False
    every = tuple(range(len(node.inputs)))
    return entry.accumulates == ("sum", every) and LINEAR(*every) in entry.passes_of(node)


def _are_passes(passes: Any) -> bool:
    return isinstance(passes, Sequence) and all(isinstance(p, Passes) for p in passes)


RULES: dict[str, Entry] = {}
_RULE_TEXT = "text, such as 'm k+, k+ n -> m n'"


@_jax.boundary
def register_rule(
    primitive,
    rule: RuleText,
    local: LocalLowering | None = None,
    *,
    passes: PassesOf = (),
    in_place: tuple[int, int] | None = None,
    sends: Sends | None = None,
    ways: Ways | None = None,
    flops: Flops | None = None,
    batch: Batch | None = None,
    made_anywhere: bool = False,
    fuses: Fuses = "none",
    reads: Reads = "all",
    accumulates: Accumulates | None = None,
    commutes: bool = False,
    of_parts: bool = False,
    anew: bool = False,
    once: bool = False,
    casts: bool = False,
    heavy: bool = False,
    as_suggested: bool = False,
) -> None:
    """Registers how a primitive is partitioned. In place of another rule, it makes JAX forget what was
    compiled by that.

    Args:
      primitive: a `jax.extend.core.Primitive`, or its name. A name that no JAX at hand has is no error.
      rule: text (see `rule.py`), or a function of the node (`.params`, `.inputs[i].shape`) that gives it.
      local: a `LocalLowering`, which writes the primitive on shards; by default the primitive is bound on
        them as it is.
      passes: through which operands pending reductions pass: `LINEAR(...)`, `MOVES(...)`, or a function of
        the node.
      in_place: (table, payload), as places among operands and results. The dims of the table that the payload
        does not have are indexed; they stay split if that is possible at all, as the rows of a gather's table
        or of an updated buffer do.
      sends: gives for each collective of `local` its kind, the axes that it is over, and the bytes that one
        device sends in it, as `("all_gather", local.operands[0].dims[1], 4096)`, so that splits can be
        priced; by default none. The bytes alone are priced as if sent to a neighbour, over any links.
      ways: picks the splits that the primitive takes, where rule and shapes do not tell; by default all.
      flops: `flops(params, in_shapes, out_shapes)` gives the FLOPs that a device does on shards of these
        shapes: a number, or None where this equation has no products. By default none, so that the primitive
        is bound by memory. What has FLOPs is split as far as may be, and they are in `Plan.estimate`.
      batch: `batch(params, in_shapes, out_shapes)` gives how many items of a batch these shards have, where
        the compiler computes several at once: for a convolution of fewer than eight images a TPU takes 3.5
        times as long. By default, and where it gives None, any number is as good.
      made_anywhere: of scalars it makes a value of which every device can make any part for nothing, as
        `iota` does.
      fuses: "all" of what is computed elementwise: XLA computes it where its one reader needs it, and it is
        never stored. "operands" of what takes in such operands but stores its result, as reductions do.
        "transposes" of what is made in any order of dims, as products are, so that one reader that transposes
        it moves nothing. By default "none".
      reads: "part" of what reads no more of its operands than it gives, as `slice` does; "none" of what moves
        nothing, as `optimization_barrier`: results, where there are as many, are the operands in memory;
        "view" of what does so where it adds or drops dims of size 1 alone, as `squeeze`.
      accumulates: ("sum", (0, 1)) of addition, ("sum", (0,)) of subtraction, ("max", (0, 1)) of a maximum:
        the result is each of these operands, reduced so with something that is made of the others alone. The
        iterations of a loop that does nothing else with a carry may be split.
      commutes: whether the operands may be exchanged.
      of_parts: whether it puts together or takes apart along some dims and passes the others through, as
        `concatenate` and `slice` do. Shardings go through these first, as through what is elementwise.
      anew: whether it makes another value each time of the same operands, as `rng_uniform` does, so that two
        equations are never one.
      once: whether what it does happens once, for all devices, as Python is called by `pure_callback`: all
        devices must run it, and each iteration of a loop around it.
      casts: whether the result is the operand in another type or precision, as of `convert_element_type`.
      heavy: whether it computes much for each element, as random bits and sorts do, so that to keep what it
        made takes less time than to make it again.
      as_suggested: whether it is split only as some operand may be made, or some result is requested, and not
        over any other axes, or dims: where a function of the user's has to answer for each split, as under
        `custom_partitioning`.

    Raises:
      ValueError: the text does not parse, has another number of results than the primitive, or lacks a mark:
        without `local`, a factor that one side alone has is reduced or unsplit. The error quotes the rule and
        the offending word. Where the rule does not fit shapes, or a lowering gives others than it promises,
        the error comes when it is used, with the user's line.

    >>> register_rule("my_scale", "..., -> ...", passes=(LINEAR(0),))
    >>> del RULES["my_scale"]  # no such primitive exists
    """
    _check_arguments(primitive, rule, passes, in_place)
    flags = dict(made_anywhere=made_anywhere, commutes=commutes, of_parts=of_parts, anew=anew, once=once)
    flags |= dict(casts=casts, heavy=heavy, as_suggested=as_suggested)
    _check_facts(flags, fuses, reads, accumulates)
    functions = dict(local=local, sends=sends, ways=ways, flops=flops, batch=batch)
    for argument, function in functions.items():
        require_function(function, f"{argument} of register_rule", or_none=True)
    name = primitive if isinstance(primitive, str) else primitive.name
    entry = Entry(
        name,
        rule,
        local,
        passes,
        in_place,
        sends,
        ways,
        flops,
        batch,
        fuses=fuses,
        reads=reads,
        accumulates=accumulates,
        **flags,
    )
    if isinstance(rule, str):
        results = len(parse(rule).results)
        if results != 1 and not getattr(primitive, "multiple_results", True):
            raise complain(
                rule, "->", f"it has {results} results, {name} has one: name one tensor after the arrow"
            )
        entry.require_fitting(parse(rule))
    if RULES.get(name, entry) != entry:
        jax.clear_caches()  # programs that were compiled by the rule that it had
    RULES[name] = entry


def _check_arguments(primitive, rule, passes, in_place) -> None:
    named = isinstance(primitive, str) and primitive or isinstance(primitive, Primitive)
    require(named, "primitive of register_rule", primitive, "a primitive, or its name")
    text = f"{_RULE_TEXT}, or a function of the node that returns it"
    require(isinstance(rule, str) or callable(rule), "rule of register_rule", rule, text)
    words = "a sequence of LINEAR(...) and MOVES(...), or a function of the node that returns it"
    require(_are_passes(passes) or callable(passes), "passes of register_rule", passes, words)
    pair = isinstance(in_place, tuple) and len(in_place) == 2 and all(map(is_integer, in_place))
    words = "the places of the table and of the payload, such as (0, 2), or None"
    require(pair or in_place is None, "in_place of register_rule", in_place, words)


def _check_facts(flags: Mapping[str, Any], fuses, reads, accumulates) -> None:
    for argument, flag in flags.items():
        require(isinstance(flag, bool), f"{argument} of register_rule", flag, "True or False")
    for argument, fact, words in (("fuses", fuses, get_args(Fuses)), ("reads", reads, get_args(Reads))):
        require(
            isinstance(fact, str) and fact in words,
            f"{argument} of register_rule",
            fact,
            f"one of {', '.join(map(repr, words))}",
        )
    require(
        accumulates is None or _is_accumulation(accumulates),
        "accumulates of register_rule",
        accumulates,
        'a reduction and operands, such as ("sum", (0, 1)), or None',
    )


def _is_accumulation(given: Any) -> bool:
    pair = isinstance(given, tuple) and len(given) == 2 and given[0] in REDUCTIONS
    return pair and isinstance(given[1], tuple) and all(is_integer(i, 0) for i in given[1])


def replicated_rule(node: Node) -> str:
    """The rule of a primitive that has none: nothing may be split.

    Written with one factor for each dim, all of them unsplit.
    """
    factors = (f"w{i}!" for i in range(10**6))
    sides = [
        ", ".join(" ".join(next(factors) for _ in shape) for shape in shapes)
        for shapes in (node.in_shapes, node.out_shapes)
    ]
    return " -> ".join(sides)


def run_replicated(local: Local, *operands):
    """The lowering of a primitive that has none: binds it as it is, a kernel in its parameters as if traced
    here.
    """
    jaxprs = {name: _jax.under_local_mesh(p) for name, p in local.params.items() if _jax.is_jaxpr(p)}
    return local.bind(*operands, **jaxprs)

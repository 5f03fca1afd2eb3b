"""The collectives of a program after JAX has lowered it (StableHLO) and after XLA has compiled it (HLO text).

Both come as the `Collective`s of the ledger, without axes, lines and reasons, which these forms no longer
have. `counts` makes them comparable with a plan's.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from scipy.optimize import linear_sum_assignment

from shardax.ledger.collectives import Collective, array_bytes, bytes_sent, other_branches


def lowered(module) -> tuple[Collective, ...]:
    """The collectives of a StableHLO module, `jax.jit(f).lower(...).compiler_ir()`, functions counted at each
    of their calls.

    A loop that counts from a constant by a constant up to one is a scan, or as good as one; any other loop is
    open.
    """
    return tuple(_Stablehlo(module).function("main"))


def compiled(text: str) -> tuple[Collective, ...]:
    """The collectives of `compiled.as_text()`.

    Loops and branches are not followed: each instruction counts once. So does an asynchronous one, whether it
    is written as start and done or, as on TPU, once in each of the fusions that it overlaps with, under one
    `chain_id`.
    """
    return tuple(_instructions(text))


@dataclass(frozen=True)
class Operation:
    """An instruction of compiled HLO: its opcode, the scopes in which it was made, and its lines
    ("file.py:12"), innermost first.
    """

    opcode: str
    scopes: str
    lines: tuple[str, ...]


def operations(text: str) -> Iterator[Operation]:
    """The instructions of `compiled.as_text()` that say where they come from."""
    frames = _frames(text)
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        scopes = _one(r'op_name="((?:[^"\\]|\\.)*)"', line, "")
        if match and scopes:
            lines = tuple(_lines(frames, _one(r"stack_frame_id=(\d+)", line, "")))
            yield Operation(match["opcode"], scopes.replace("\\'", "'"), lines)


def _lines(frames: dict[str, tuple[str, str]], frame: str) -> Iterator[str]:
    while frame in frames:
        line, frame = frames[frame]
        yield line


def _frames(text: str) -> dict[str, tuple[str, str]]:
    """(line, frame around it) of each stack frame, from the tables at the head of the module. XLA counts
    parents from 1 on, 1 for none."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _section(text, "FileLocations"), re.M)
    located = {place: f"{files[file]}:{line}" for place, file, line in places}
    frames = re.findall(
        r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", _section(text, "StackFrames"), re.M
    )
    return {frame: (located[place], str(int(parent) - 1)) for frame, place, parent in frames}


def _section(text: str, name: str) -> str:
    return _one(rf"(?s)\n{name}\n(.*?)\n\n", text, "")


def counts(collectives: Iterable[Collective]) -> Counter:
    """How often (kind, devices, bytes of the operand, "" or "open loop" or "other branch") runs in a call.

    Operands of one collective count one by one: XLA combines, and JAX lowers a psum of several to several.
    """
    total = Counter()
    for c in collectives:
        mark = "open loop" if c.open_loop else "other branch" if c.other_branch else ""
        sizes = list(map(array_bytes, c.operands))
        for nbytes in (
            [sum(sizes)] if c.kind == "all_to_all" else sizes
        ):  # XLA may write its pieces as operands
            total[c.kind, c.devices, nbytes, mark] += c.trips
    return total


Entry = tuple[str, int, int, str]  # as `counts` has them


def normalized(
    planned: Iterable[Collective], compiled: Iterable[Collective], backend: str
) -> tuple[Counter, Counter, Counter]:
    """What only the plan holds, what only the compiled program holds, and how often each listed rewriting
    explains the rest.

    Loops and branches count once, as in the text of a compiled program.

    Args:
      planned: the ledger of a plan.
      compiled: what `compiled` reads.
      backend: "cpu" or "tpu", whose `REWRITINGS` are allowed.
    """
    left, options = counts(compiled), list[tuple[Entry, dict[Entry, str]]]()
    for c in planned:
        for entry, times in counts([_once(c)]).items():
            others = {o: words for words, rewrite in REWRITINGS[backend].items() for o in rewrite(entry, c)}
            options += [(entry, {entry: "", **others})] * times
    compiled_kinds = set(left)
    taken = _matched([list(others) for _, others in options], left)
    only_planned, applied = Counter[Entry](), Counter[str]()
    for (entry, others), one in zip(options, taken, strict=True):
        if one is not None:
            applied[others[one]] += 1
        elif entry in compiled_kinds:
            applied[CSE] += 1
        else:
            only_planned[entry] += 1
    del applied[""]
    return only_planned, left - Counter(one for one in taken if one is not None), applied


def _matched(options: Sequence[Sequence[Entry]], there: Counter[Entry]) -> list[Entry | None]:
    """For each of some the one that it became, of those that it may have been, each as often as it is there:
    as many as possible, then the first ones.
    """
    columns = list(there.elements())
    nowhere = sum(map(len, options)) + 1
    prices = np.full((len(options), len(columns)), nowhere)
    for row, ranked in enumerate(options):
        rank = {entry: i for i, entry in enumerate(ranked)}
        prices[row] = [rank.get(entry, nowhere) for entry in columns]
    pairs = zip(*linear_sum_assignment(prices), strict=True)
    taken = {row: columns[column] for row, column in pairs if prices[row, column] < nowhere}
    return [taken.get(row) for row in range(len(options))]


def _once(c: Collective) -> Collective:
    return replace(c, trips=1, open_loop=False, other_branch=False)


def _half(entry: Entry, c: Collective) -> Iterator[Entry]:
    kind, devices, nbytes, mark = entry
    if kind in ("all_gather", "all_to_all", "ppermute") and c.dtype == "float32":
        yield kind, devices, nbytes // 2, mark


def _gather_as_reduction(entry: Entry, c: Collective) -> Iterator[Entry]:
    kind, devices, nbytes, mark = entry
    if kind == "all_gather":
        yield "all_reduce", devices, nbytes * devices, mark


def _scatter_as_reduction(entry: Entry, c: Collective) -> Iterator[Entry]:
    kind, devices, nbytes, mark = entry
    if kind == "reduce_scatter":
        yield "all_reduce", devices, nbytes, mark


def _stacked(entry: Entry, c: Collective) -> Iterator[Entry]:
    kind, devices, nbytes, mark = entry
    if kind == "all_reduce" and c.trips > 1:
        yield kind, devices, nbytes * c.trips, mark


def _widened(entry: Entry, c: Collective) -> Iterator[Entry]:
    kind, devices, nbytes, mark = entry
    if kind in ("all_reduce", "reduce_scatter") and c.dtype in ("bfloat16", "float16"):
        yield kind, devices, 2 * nbytes, mark


CSE = "equal collectives of equal operands, as recomputation has them, run once"
REWRITINGS: dict[str, dict[str, Callable[[Entry, Collective], Iterator[Entry]]]] = {
    "cpu": {"sums of bfloat16 and float16 are sent as float32": _widened},
    "tpu": {
        "what feeds only products moves as bfloat16, in which they are computed": _half,
        "a short gather is a sum of the whole, zeros elsewhere": _gather_as_reduction,
        "a short reduce-scatter along the minor-most dim is an all-reduce and a slice": _scatter_as_reduction,
        "sums that a loop only stacks are one sum of the stack, after it": _stacked,
    },
}


class _Stablehlo:
    """A walk over a module's operations, for which the objects that JAX hands out suffice."""

    def __init__(self, module):
        named = [op for op in module.body.operations if "sym_name" in op.attributes]
        self.symbols = {op.attributes["sym_name"].value: op for op in named}

    def function(self, name: str) -> Iterator[Collective]:
        return self.regions(self.symbols[name])

    def regions(self, op) -> Iterator[Collective]:
        for region in op.regions:
            yield from self.region(region)

    def region(self, region) -> Iterator[Collective]:
        for block in region.blocks:
            for op in block.operations:
                yield from self.operation(op.operation)

    def operation(self, op) -> Iterator[Collective]:
        match op.name.removeprefix("stablehlo."):
            case "func.call":
                return self.function(op.attributes["callee"].value)
            case "composite":
                return self.function(op.attributes["decomposition"].value)
            case "case" | "if":
                return other_branches(map(self.region, op.regions))
            case "while":
                return self.loop(op)
            case name if name in _KINDS:
                return self.collective(_KINDS[name], op)
        return self.regions(op)

    def loop(self, op) -> Iterator[Collective]:
        trip_count = _trip_count(op)
        for c in self.regions(op):
            yield replace(c, open_loop=True) if trip_count is None else replace(c, trips=c.trips * trip_count)

    def collective(self, kind: str, op) -> Iterator[Collective]:
        if kind == "ppermute":
            pairs = op.attributes["source_target_pairs"]
            devices = sum(pairs[i] != pairs[i + 1] for i in range(0, len(pairs), 2))
        else:
            devices = self.group_size(op.attributes["replica_groups"])
        types = [operand.type for operand in op.operands]
        return _collective(kind, devices, [(str(t.element_type), tuple(t.shape)) for t in types])

    def group_size(self, groups) -> int:
        if hasattr(groups, "type") and hasattr(groups.type, "shape"):  # dense, one row per group
            return groups.type.shape[1]
        mesh = str(self.symbols[_one(r"mesh = @(\w+)", str(groups))].attributes["mesh"])
        sizes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', mesh)}
        assert "sub_axis" not in str(groups), groups
        return math.prod(sizes[name] for name in re.findall(r'axis_ref<name = "([^"]+)"', str(groups)))


def _trip_count(loop) -> int | None:
    """(bound - start) / step of a loop `while i < bound: i += step`, all three constants; None for
    another.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    ops = [op.operation for op in condition.operations]
    if [op.name.removeprefix("stablehlo.") for op in ops] != ["constant", "compare", "return"]:
        return None
    counter, bound = ops[1].operands
    if "LT" not in str(ops[1].attributes["comparison_direction"]) or bound != ops[0].results[0]:
        return None
    at = list(condition.arguments).index(counter)
    *_, returned = (op.operation for op in body.operations)
    start, step = _integer(loop.operands[at]), _added(returned.operands[at], body.arguments[at])
    return max(0, -(-(_integer(bound) - start) // step)) if start is not None and step else None


def _integer(value) -> Any:
    """The constant that a value is, None where it is none."""
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") != "stablehlo.constant" or not str(value.type).startswith(
        ("tensor<i", "tensor<ui")
    ):
        return None
    return owner.attributes["value"][0]


def _added(value, to) -> int | None:
    """What is added to `to`, where that makes `value`."""
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") != "stablehlo.add" or owner.operands[0] != to:
        return None
    return _integer(owner.operands[1])


def _instructions(text: str) -> Iterator[Collective]:
    """Operands carry no types in the text, so those of the computation at hand are kept."""
    types: dict[str, str] = {}
    chains: set[str] = set()
    partitions = int(_one(r"num_partitions=(\d+)", text, "1"))
    for line in text.splitlines():
        if line.endswith("{"):
            types = {}
        if match := _INSTRUCTION.match(line):
            types[match["name"]] = match["type"]
            kind = _KINDS.get(match["opcode"].removesuffix("-start").replace("-", "_"))
            chain = _one(r'chain_id="(\d+)"', match["rest"], "")
            if kind and chain not in chains:  # of a chain the first instruction alone counts
                chains |= {chain} - {""}
                operands = re.findall(r"%[\w.-]+", match["rest"].split("), ")[0])
                arrays = [array for operand in operands for array in _arrays(types[operand])]
                yield from _collective(kind, _participants(kind, match["rest"], partitions), arrays)


_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?(?P<name>%[\w.-]+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)


def _arrays(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a type, as (dtype, shape).

    >>> _arrays("(f32[8,16]{1,0:T(8,128)}, u32[])")
    [('f32', (8, 16)), ('u32', ())]
    """
    types = re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_text)
    return [(dtype, tuple(map(int, filter(None, shape.split(","))))) for dtype, shape in types]


def _participants(kind: str, attributes: str, partitions: int) -> int:
    """Devices in a group; of a ppermute, those that send. XLA writes groups in three ways:

    >>> groups = ("{{0,2},{1,3}}", "[4,2]<=[8]", "mesh['x'=4,'y.0'=2] {'y.0'}")
    >>> [_participants("all_reduce", f"replica_groups={g}, x", 8) for g in groups]
    [2, 2, 2]
    """
    if kind == "ppermute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", _one(r"source_target_pairs=\{(.*?\})\}", attributes))
        return sum(a != b for a, b in pairs)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    return partitions


def _collective(kind: str, devices: int, arrays: list[tuple[str, tuple[int, ...]]]) -> Iterator[Collective]:
    operands = tuple(
        jax.ShapeDtypeStruct(shape, _DTYPES.get(dtype.lower(), dtype)) for dtype, shape in arrays
    )
    nbytes = sum(bytes_sent(kind, array_bytes(x), devices) for x in operands)
    if nbytes:
        yield Collective(kind, (), devices, nbytes, operands)


def _one(pattern: str, text: str, default: Any = None) -> Any:
    match = re.search(pattern, text)
    assert match or default is not None, (pattern, text)
    return match[1] if match else default


_KINDS = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "collective_broadcast": "broadcast",
    "collective_permute": "ppermute",
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
}

_DTYPES = {  # MLIR's names and XLA's, in lower case, where they are not numpy's
    "bf16": "bfloat16",
    "c128": "complex128",
    "c64": "complex64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i1": "bool",
    "pred": "bool",
    **{f"{short}{bits}": f"int{bits}" for bits in (8, 16, 32, 64) for short in ("i", "s")},
    **{f"{short}{bits}": f"uint{bits}" for bits in (8, 16, 32, 64) for short in ("u", "ui")},
}

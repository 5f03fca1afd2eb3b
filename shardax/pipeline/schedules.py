"""The schedules that have names, and those of users.

For p stages, m microbatches and v chunks, each is the order in which a stage runs its instructions, of which
`pack` makes a table.

They are in `NAMES`, at the end. `python -m shardax.pipeline list` prints them with their bubbles and what
they keep.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.pipeline.packing import is_word, pack, parse
from shardax.pipeline.table import Instruction, Placement, Schedule, loop, positive, zigzag

Maker = Callable[[int, int, int], str | Schedule]  # of stages, microbatches, chunks


def make_schedule(
    schedule: str | Schedule | Maker,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    backward: bool = True,
    latency: int = 1,
) -> Schedule:
    """A schedule by name, by text (one line per stage, see `parse`), by a function of stages, microbatches
    and chunks that returns a text or a Schedule, or a Schedule as it is.

    `chunks`: pieces of the model on each stage; None: 2 where a schedule needs several, else 1. Not
    `backward`: its forward passes alone. `latency`: `Schedule.latency`.

    Raises ValueError for an unknown name, sizes that it does not allow or that differ from the text's, and
    what is wrong with a text.

    >>> print(make_schedule("1f1b", 2, 3).text())
    F0 F1 - B0 F2 B1 - B2
    - F0 B0 F1 B1 F2 B2
    """
    positive("stages", stages)
    positive("microbatches", microbatches)
    if chunks is not None:
        positive("chunks", chunks)
        chunks = int(chunks)
    if isinstance(schedule, str) and _is_text(schedule):
        made = parse(schedule, "the schedule", chunks, latency=latency)
    elif isinstance(schedule, str):
        made = _named(schedule, stages, microbatches, chunks, latency)
    elif callable(schedule):
        name = getattr(schedule, "__name__", "the schedule")
        _check_maker(schedule, "schedule")
        found = schedule(stages, microbatches, chunks or 1)
        made = parse(found, name, chunks, latency=latency) if isinstance(found, str) else found
    else:
        made = schedule
    _check_made(made, "schedule")
    for what, given in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if given is not None and getattr(made, what) != given:
            raise ValueError(
                f"{made.name} has {getattr(made, what)} {what}; expected {given}: write it for "
                f"{given}, or take another number of {what}"
            )
    return made if backward or not made.backward else forward_only(made)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward passes of a schedule, in its order."""
    orders = [[i for i in order if i and i.kind == "F"] for order in schedule.orders]
    name = f"{schedule.name}, forward"
    return pack(name, orders, schedule.chunks, schedule.placement, schedule.latency)


def check_schedule(schedule: Any, argument: str) -> None:
    """Raises ValueError for what is a schedule of no number of stages: an unknown name, or no name, text,
    function of three numbers or Schedule. "auto" is a name here.
    """
    if isinstance(schedule, str):
        if schedule != "auto" and not _is_text(schedule):
            _check_name(schedule, argument)
    elif callable(schedule):
        _check_maker(schedule, argument)
    else:
        _check_made(schedule, argument)


def _is_text(schedule: str) -> bool:
    return all(map(is_word, schedule.split()[:1]))


def _check_name(name: str, argument: str) -> None:
    if name not in NAMES:
        raise ValueError(
            f"{argument} is {name!r}; expected one of {_names()}, or a text with a line per stage (F0 F1 B0)"
        )


def _check_made(made: Any, argument: str) -> None:
    if not isinstance(made, Schedule):
        raise ValueError(
            f"{argument} is {made!r}; expected a name ({_names()}), a text, a function or a Schedule"
        )


def _check_maker(schedule: Callable[..., Any], argument: str) -> None:
    """Raises ValueError unless a function can be called with three numbers."""
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # of what is compiled none is known
        return
    try:
        signature.bind(0, 0, 0)
    except TypeError as error:
        name = getattr(schedule, "__name__", "the function")
        raise ValueError(
            f"{argument} is {name}{signature}, which cannot be called with three numbers ({error}); expected "
            "a function of stages, microbatches and chunks: give it three parameters, also if it needs fewer"
        ) from None


def _names() -> str:
    return ", ".join([*NAMES, "auto"])


def _named(name: str, stages: int, microbatches: int, chunks: int | None, latency: int) -> Schedule:
    if name == "auto":
        raise ValueError("schedule='auto' needs costs to choose by; use `shardax.pipeline.simulate.choose`")
    _check_name(name, "schedule")
    kind = NAMES[name]
    chunks = chunks or kind.chunks
    if not kind.any_chunks and chunks != kind.chunks:
        several = ", ".join(other for other, kind in NAMES.items() if kind.any_chunks)
        raise ValueError(
            f"{name} has chunks={kind.chunks} on each stage; got chunks={chunks}: leave chunks out, or "
            f"take one of {several}"
        )
    orders = [kind.order(d, stages, microbatches, chunks) for d in range(stages)]
    return pack(name, orders, chunks, kind.placement(stages, chunks), latency, kind.aligned)


# ------------------------------------------------------------------------------ the order of stage d, of each


def forward_order(d: int, p: int, m: int, v: int) -> list[Instruction]:
    return _passes("F", _groups(p, m), range(v))


def gpipe(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """Backward passes in reverse order: what was made last is needed first."""
    forward = _passes("F", [range(m)], range(v))
    return forward + [Instruction("B", i.microbatch, i.chunk) for i in reversed(forward)]


def naive(d: int, p: int, m: int, v: int) -> list[Instruction]:
    there, back = range(v), range(v)[::-1]
    return [i for j in range(m) for i in _passes("F", [[j]], there) + _passes("B", [[j]], back)]


def one_f_one_b(d: int, p: int, m: int, v: int) -> list[Instruction]:
    return one_by_one(_one("F", m), _one("B", m), p - d)


def interleaved(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """Microbatches go round the ring in groups of p or a few more, so that the first of a group is back when
    its last has left, and none waits. So many are ahead that forward and backward passes take turns on all
    stages at once (with one chunk: Zhuang et al., arXiv 2211.05322).
    """
    return _eager(d, p, m, v)


def zb_eager(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """The same, with d passes of which the weights' gradients are owed: F, B and W take turns."""
    return _eager(d, p, m, v, owed=d)


def _eager(d: int, p: int, m: int, v: int, owed: int | None = None) -> list[Instruction]:
    groups = _groups(p, m)
    ahead = (v - 1) * len(groups[0]) + 2 * (p - d) - 1
    forward, backward = _passes("F", groups, range(v)), _passes("B", groups, range(v)[::-1])
    return one_by_one(forward, backward, ahead, owed)


def zb_h1(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """As 1f1b. A stage has p - d forward passes ahead, and d of which the weights' gradients are owed: p in
    all.
    """
    return one_by_one(_one("F", m), _one("B", m), p - d, d)


def zb_h2(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """So many forward passes ahead that nothing is ever waited for: 2 p - 1 are kept."""
    return one_by_one(_one("F", m), _one("B", m), 2 * (p - d) - 1, 2 * d)


def zbv(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """Chunk 0 is passed down, chunk 1 up: the last virtual stage is on the first stage, and its backward pass
    begins there early (Qi et al., Pipeline Parallelism with Controllable Memory, V-ZB).
    """
    n = max(m, 2 * p - 1)  # the pattern needs so many; those that are too many are left out
    row = _Counted()
    row.add("F0", times=2 * (p - d) - 1)
    row.add("F1 F0", times=d)
    row.add("F1 B1 W1", times=p - d)
    while row.count["F1"] < n:
        row.add("F0", times=row.count["F0"] < n)
        row.add("B0 W0 F1 B1 W1")
    row.add("B0 B1", times=d)
    row.add("B0 W0", times=p - d)
    row.add("W1", times=n - row.count["W1"])
    row.add("W0", times=n - row.count["W0"])
    return [i for i in row.order if i.microbatch < m]


def dualpipev(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """DeepSeek's `dualpipev.py`, its eight steps. There a forward and a backward pass overlap in a pair; here
    they follow each other. Backward passes are split (b, w) where the gradients of weights fill a bubble.
    """
    n = max(m, 2 * p)
    row = _Counted()
    row.add("F0", times=2 * (p - d - 1))
    row.add("F0 F1", times=d + 1)
    row.add("b1 w F1", times=p - d - 1)
    row.add("F0 B1 F1 B0", times=n - 2 * p + d + 1)
    row.add("B1 F1 B0", times=p - d - 1)
    for i in range(d + 1):
        half = (d + 1) // 2
        row.add("b1" if i > half or (i == half and d % 2) else "B1")
        row.add("b0" if i >= half else "B0")
    row.add("w b0", times=p - d - 1)
    row.add("w", times=len(row.owed))
    return [i for i in row.order if i.microbatch < m]


class _Counted:
    """An order of which only kinds and chunks are told: microbatches are counted. `b1` is a B1 whose W is
    owed, `w` the W that has been owed for longest.
    """

    def __init__(self):
        self.order: list[Instruction] = []
        self.owed: list[Instruction] = []
        self.count: Counter[str] = Counter()

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            self.order.append(self.owed.pop(0) if word == "w" else self._next(word))

    def _next(self, word: str) -> Instruction:
        kind, chunk = word[0].upper(), int(word[1])
        i = Instruction(kind, self.count[kind + word[1]], chunk)
        self.count[kind + word[1]] += 1
        if word[0] == "b":
            self.owed.append(Instruction("W", i.microbatch, chunk))
        return i


# ------------------------------------------------------------------------------------- what they are made of


def one_by_one(
    forward: Sequence[Instruction], backward: Sequence[Instruction], ahead: int, owed: int | None = None
) -> list[Instruction]:
    """`ahead` forward passes, then a backward and a forward one in turn. Unless `owed` is None, the gradients
    of the weights come apart, each after `owed` more backward passes.
    """
    order, waiting = list(forward[:ahead]), list(forward[ahead:])
    weights: list[Instruction] = []
    for i in backward:
        order.append(i)
        if owed is not None:
            weights.append(Instruction("W", i.microbatch, i.chunk))
            if len(weights) > owed:
                order.append(weights.pop(0))
        if waiting:
            order.append(waiting.pop(0))
    return order + weights


def _groups(p: int, m: int) -> list[range]:
    """Microbatches that go round the ring together: p or, where p does not divide m, a few more."""
    count = max(1, m // p)
    ends = [-(-m * n // count) for n in range(count + 1)]  # the largest first: see one_f_one_b
    return [range(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


def _passes(kind: str, groups: Iterable[Iterable[int]], chunks: Iterable[int]) -> list[Instruction]:
    chunks = tuple(chunks)
    return [Instruction(kind, j, c) for group in map(tuple, groups) for c in chunks for j in group]


def _one(kind: str, m: int) -> list[Instruction]:
    return _passes(kind, [range(m)], [0])


@dataclass(frozen=True)
class Kind:
    """A schedule by name: what it is; the order of stage d of p for m microbatches and v chunks; the chunks
    unless told otherwise, and whether there may be others; which chunks virtual stages are; whether all
    stages run the same kind of instruction in a tick.
    """

    about: str
    order: Callable[[int, int, int, int], list[Instruction]]
    chunks: int = 1
    any_chunks: bool = False
    placement: Callable[[int, int], Placement] = loop
    aligned: bool = False


NAMES = {
    "naive": Kind("one microbatch in all stages (DistBelief's layer placement)", naive, any_chunks=True),
    "gpipe": Kind("all forward passes, then all backward (GPipe)", gpipe),
    "circular": Kind("the same, several times round the ring of stages (GSPMD)", gpipe, 2, True),
    "1f1b": Kind("a backward pass as soon as there is one (PipeDream-flush)", one_f_one_b),
    "eager-1f1b": Kind("1F1B with more ahead, F and B in turn on all stages", interleaved, aligned=True),
    "interleaved": Kind("the same with several chunks (Megatron-LM)", interleaved, 2, True, aligned=True),
    "zb-eager": Kind("either with W later, F, B and W in turn", zb_eager, any_chunks=True, aligned=True),
    "zb-h1": Kind("1F1B with the gradients of weights later (Zero Bubble)", zb_h1),
    "zb-h2": Kind("the same with more ahead", zb_h2),
    "zbv": Kind("zero bubble, two chunks in a V (Controllable Memory)", zbv, 2, placement=zigzag),
    "dualpipev": Kind("DeepSeek's DualPipe, cut in half: two chunks in a V", dualpipev, 2, placement=zigzag),
    "forward": Kind("forward passes alone, for inference", forward_order, any_chunks=True),
}

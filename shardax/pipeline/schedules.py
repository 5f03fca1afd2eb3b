"""The schedules that have names, and those of users: for p stages, m microbatches and v chunks, the order in which each
stage runs its instructions. `pack` makes a table of them.

    name            what it is                                                    idle ticks of a stage   kept
    "naive"         one microbatch in all stages (DistBelief's layer placement)   2 m (p - 1)             1
    "gpipe"         all forward, then all backward                                2 (p - 1)               m
    "circular"      the same, round the ring of stages v times (GSPMD, §3.3)      2 (p - 1)               v m
    "1f1b"          a backward pass as soon as there is one (PipeDream-flush)     2 (p - 1)               p
    "interleaved"   the same with v chunks (Megatron-LM)                          2 (p - 1)               v p + p - 1
    "zb-h1"         1f1b, weights' gradients later (Qi et al., Zero Bubble)       p - 1                   p
    "zb-h2"         the same, with more forwards ahead                            p - 1, none waiting     2 p - 1
    "zbv"           zero bubble on a V of two chunks                              p - 1, none waiting     2 p
    "forward"       forward passes alone, for inference                           p - 1                   0

Ticks are those of a chunk, where m is not small (2 p, say); kept are forward passes of a chunk.
"""

from collections.abc import Callable, Iterable, Sequence

from shardax.pipeline.table import Instruction, Schedule, loop, pack, parse, positive, zigzag

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
    """A schedule by name, by text (`table.parse`: one line per stage), by a function of stages, microbatches and
    chunks that returns either, or as it is.

    `chunks`: pieces of the model on each stage; None: 2 where a schedule needs several, else 1. Not `backward`: its
    forward passes alone. `latency`: `Schedule.latency`.

    Raises ValueError for an unknown name, sizes that it does not allow or that differ from the text's, and what is
    wrong with a text.

    >>> print(make_schedule("1f1b", 2, 3).text())
    F0 F1 - B0 F2 B1 - B2
    - F0 B0 F1 B1 F2 B2
    """
    positive("stages", stages)
    positive("microbatches", microbatches)
    if chunks is not None:
        positive("chunks", chunks)
    if isinstance(schedule, str) and (len(schedule.split()) > 1 or "\n" in schedule):
        made = parse(schedule, "the schedule", chunks, latency=latency)
    elif isinstance(schedule, str):
        made = _named(schedule, stages, microbatches, chunks, latency)
    elif callable(schedule):
        name = getattr(schedule, "__name__", "the schedule")
        found = schedule(stages, microbatches, chunks or 1)
        made = parse(found, name, chunks, latency=latency) if isinstance(found, str) else found
    else:
        made = schedule
    if not isinstance(made, Schedule):
        raise ValueError(
            f"schedule is {made!r}; expected a name ({', '.join(NAMES)}), a text, a function or a Schedule"
        )
    for what, given in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if given is not None and getattr(made, what) != given:
            raise ValueError(f"{made.name} has {getattr(made, what)} {what}; expected {given}")
    return made if backward or not made.backward else forward_only(made)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward passes of a schedule, in its order."""
    orders = [[i for i in order if i and i.kind == "F"] for order in schedule.orders]
    name = f"{schedule.name}, forward"
    return pack(name, orders, schedule.chunks, schedule.placement, schedule.latency)


def _named(name: str, stages: int, microbatches: int, chunks: int | None, latency: int) -> Schedule:
    if name not in NAMES:
        raise ValueError(
            f"schedule is {name!r}; expected one of {', '.join(NAMES)}, or a text with a line per stage (F0 F1 B0 ...)"
        )
    orders, allowed, placement = NAMES[name]
    chunks = chunks or allowed[0]
    if allowed[-1] is not ... and chunks not in allowed:
        raise ValueError(
            f"{name} has {allowed[0]} chunk{'s' * (allowed[0] > 1)} on each stage; got chunks={chunks}"
        )
    made = [orders(d, stages, microbatches, chunks) for d in range(stages)]
    return pack(name, made, chunks, placement(stages, chunks), latency)


# -------------------------------------------------------------------------------- the order of stage d, of each


def forward_order(d: int, p: int, m: int, v: int) -> list[Instruction]:
    return _passes("F", _groups(p, m), range(v))


def gpipe(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """Backward passes in reverse order: what was made last is needed first."""
    forward = _passes("F", [range(m)], range(v))
    return forward + [Instruction("B", i.microbatch, i.chunk) for i in reversed(forward)]


def naive(d: int, p: int, m: int, v: int) -> list[Instruction]:
    return [i for j in range(m) for i in gpipe_of(j, v)]


def gpipe_of(microbatch: int, v: int) -> list[Instruction]:
    return [
        *_passes("F", [[microbatch]], range(v)),
        *_passes("B", [[microbatch]], reversed(range(v))),
    ]


def one_f_one_b(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """The first forward pass is back after all of its round, the next one a tick later for each stage further on.

    With several chunks, microbatches go round the ring in groups of p or a few more, so that the first of a group
    is back when its last has left, and none waits.
    """
    groups = _groups(p, m)
    ahead = (v - 1) * len(groups[0]) + (p - d if v == 1 else 2 * (p - d) - 1)
    forward, backward = _passes("F", groups, range(v)), _passes("B", groups, range(v)[::-1])
    return one_by_one(forward, backward, ahead)


def zb_h1(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """As 1f1b. A stage has p - d forward passes ahead, and d of which the weights' gradients are owed: p in all."""
    return one_by_one(_one("F", m), _one("B", m), p - d, d)


def zb_h2(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """So many forward passes ahead that nothing is ever waited for: 2 p - 1 are kept."""
    return one_by_one(_one("F", m), _one("B", m), 2 * (p - d) - 1, 2 * d)


def zbv(d: int, p: int, m: int, v: int) -> list[Instruction]:
    """Chunk 0 is passed down, chunk 1 up, so that the last virtual stage is on the first stage, and its backward pass
    begins there early (Qi et al., Pipeline Parallelism with Controllable Memory, V-ZB).
    """
    n = max(m, 2 * p - 1)  # the pattern needs so many; those that are too many are left out
    order: list[Instruction] = []
    count = {(kind, c): 0 for kind in "FBW" for c in (0, 1)}

    def add(*steps: str, times: int = 1) -> None:
        for step in steps * times:
            key = step[0], int(step[1])
            order.append(Instruction(key[0], count[key], key[1]))
            count[key] += 1

    add("F0", times=2 * (p - d) - 1)
    add("F1", "F0", times=d)
    add("F1", "B1", "W1", times=p - d)
    while count["F", 1] < n:
        if count["F", 0] < n:
            add("F0")
        add("B0", "W0", "F1", "B1", "W1")
    add("B0", "B1", times=d)
    add("B0", "W0", times=p - d)
    add("W1", times=n - count["W", 1])
    add("W0", times=n - count["W", 0])
    return [i for i in order if i.microbatch < m]


# ------------------------------------------------------------------------------------------- what they are made of


def one_by_one(
    forward: Sequence[Instruction], backward: Sequence[Instruction], ahead: int, owed: int | None = None
) -> list[Instruction]:
    """`ahead` forward passes, then a backward and a forward one in turn. Unless `owed` is None, the gradients of the
    weights come apart, each after `owed` more backward passes.
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


# the orders, the chunks that they allow (the first unless told otherwise, `...`: any), and where virtual stages are
NAMES = {
    "naive": (naive, (1, ...), loop),
    "gpipe": (gpipe, (1,), loop),
    "circular": (gpipe, (2, ...), loop),
    "1f1b": (one_f_one_b, (1,), loop),
    "interleaved": (one_f_one_b, (2, ...), loop),
    "zb-h1": (zb_h1, (1,), loop),
    "zb-h2": (zb_h2, (1,), loop),
    "zbv": (zbv, (2,), zigzag),
    "forward": (forward_order, (1, ...), loop),
}

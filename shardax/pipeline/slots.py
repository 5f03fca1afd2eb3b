"""A schedule as arrays of integers for the program that runs it: slots of its buffers, sends and arrivals."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from shardax.pipeline.table import Instruction, Schedule

IDLE, FORWARD, BACKWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS = range(5)
TO_NEXT, TO_PREVIOUS, TO_SELF = range(3)
WAYS = TO_NEXT, TO_PREVIOUS, TO_SELF
BUFFERS = "saved", "forward", "cotangent"
Send = tuple[
    str, int, int, int, int
]  # F or B, microbatch, receiving virtual stage, sending stage, receiving stage


@dataclass(frozen=True)
class Tables:
    """What a program needs to run a schedule: int32 arrays of shape [ticks, stages], -1 where there is
    nothing.

    Read row t at the stage's own column. In tick t the stage runs `kind` (IDLE, FORWARD, BACKWARD the whole
    one, BACKWARD_INPUTS, BACKWARD_WEIGHTS) of `microbatch` and `chunk`, which is virtual stage `virtual` (all
    0 if idle, so that they can index). Three buffers per stage hold what waits, each of as many slots as ever
    live at once there:

    saved       what a forward pass keeps (its input, or residuals) until the last of its backward passes.
                FORWARD writes slot `saved` in its tick, the backward passes read the slot that stands in
                their row. -1 where the program has no backward passes.
    forward     activations that have arrived and wait for their forward pass. FORWARD reads slot `forward`;
                -1: virtual stage 0, whose input is the program's.
    cotangent   cotangents that have arrived and wait. BACKWARD, BACKWARD_INPUTS and BACKWARD_WEIGHTS read
                slot `cotangent` (it stays until the last of them); -1: the last virtual stage, whose
                cotangent is the loss's.

    Instructions read at the beginning of their tick, arrivals are stored at its end: a slot that is read in
    tick t may be overwritten at the end of tick t, and what is stored at the end of tick t is read in t + 1
    at the earliest. `saved` is written within the tick: a slot that is read in tick t is written again in t +
    1 at the earliest.

    arriving_forward, arriving_cotangent
                [ticks, stages, 3]: the slot in which what comes by way 0, 1 or 2 at the end of tick t is
                stored, -1 if nothing comes. Way TO_NEXT is the ppermute by which every stage sends to the
                next one (the receiver hears from the previous one), TO_PREVIOUS the other one, and TO_SELF
                what the stage's own instruction of tick t made. Of the two arrays one at most has a slot for
                a way.
    send        the way by which the output of the instruction in tick t goes: the activation of a FORWARD,
                the cotangent of a BACKWARD or BACKWARD_INPUTS; -1: nowhere (the last forward's output is the
                program's result, the first backward's is the cotangent of its input). Receivers know what to
                keep, so a program may send on every way in every tick.

    With `latency` 1 the two ppermutes of tick t carry the outputs of tick t; with latency L, those of tick t
    - L + 1 (carry the output to the next tick, and send it there while its instruction runs). TO_SELF never
    waits.

    `permutations[way]`: the (source, destination) pairs that the schedule ever uses, for ways 0 and 1.
    `saved_slots`, `forward_slots`, `cotangent_slots`: for each stage, the number of slots; a program that is
    the same on all stages takes the largest.
    """

    latency: int
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    virtual: np.ndarray
    saved: np.ndarray
    forward: np.ndarray
    cotangent: np.ndarray
    arriving_forward: np.ndarray
    arriving_cotangent: np.ndarray
    send: np.ndarray
    permutations: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    saved_slots: tuple[int, ...]
    forward_slots: tuple[int, ...]
    cotangent_slots: tuple[int, ...]


def sends(schedule: Schedule) -> list[Send]:
    """All that passes from one virtual stage to another, in order: (F or B, microbatch, receiving virtual
    stage, sending stage, receiving stage).
    """
    found = []
    for kind, microbatch, virtual in schedule.where:
        target = {"F": virtual + 1, "B": virtual - 1, "W": -1}[kind]
        if 0 <= target < schedule.virtual_stages:
            found.append((kind, microbatch, target, schedule.homes[virtual][0], schedule.homes[target][0]))
    return found


def way(kind: str, source: int, destination: int, stages: int) -> int:
    """By which way: of two stages, which are both next and previous, activations go to the next."""
    if source == destination:
        return TO_SELF
    steps = {TO_NEXT: 1, TO_PREVIOUS: -1}
    first = TO_NEXT if kind == "F" else TO_PREVIOUS
    return first if (source + steps[first]) % stages == destination else 1 - first


def lifetimes(schedule: Schedule) -> Mapping[str, Mapping[tuple[int, int], tuple[int, int]]]:
    """For each buffer, the first and last tick in which what is kept for (microbatch, virtual stage) is
    there.
    """
    where, found = schedule.where, defaultdict(dict)
    for kind, microbatch, virtual, source, destination in sends(schedule):
        sender = virtual - 1 if kind == "F" else virtual + 1
        begin = where[kind, microbatch, sender] + (1 if source == destination else schedule.latency)
        end = where["F", microbatch, virtual] if kind == "F" else schedule.last_use(microbatch, virtual)
        found["forward" if kind == "F" else "cotangent"][microbatch, virtual] = begin, end
    if schedule.backward:
        for (kind, microbatch, virtual), t in where.items():
            if kind == "F":
                found["saved"][microbatch, virtual] = t, schedule.last_use(microbatch, virtual)
    return {name: found[name] for name in BUFFERS}


def color(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """A number for each closed interval, of as few as ever overlap: the lowest that is free when it begins.

    >>> color([(0, 3), (1, 2), (3, 5), (4, 4)])
    [0, 1, 1, 0]
    """
    intervals = list(intervals)
    numbers, free, busy, count = [0] * len(intervals), [], [], 0
    for n in sorted(range(len(intervals)), key=lambda n: intervals[n]):
        begin, end = intervals[n]
        while busy and busy[0][0] < begin:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, count)
            count += 1
        numbers[n] = heappop(free)
        heappush(busy, (end, numbers[n]))
    return numbers


def peak(intervals: Iterable[tuple[int, int]]) -> int:
    """How many closed intervals overlap at most."""
    changes = sorted(change for begin, end in intervals for change in ((begin, 1), (end + 1, -1)))
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def slot_counts(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """For each buffer, the number of slots on each stage."""
    return {name: _counts(schedule, _numbers(schedule, each)) for name, each in lifetimes(schedule).items()}


def tables(schedule: Schedule) -> Tables:
    """A schedule as the arrays that `Tables` describes.

    >>> from shardax.pipeline.schedules import make_schedule
    >>> t = tables(make_schedule("1f1b", 2, 2))
    >>> t.kind.T  # stage 0: F0 F1 - B0 - B1
    array([[1, 1, 0, 2, 0, 2],
           [0, 1, 2, 1, 2, 0]], dtype=int32)
    >>> t.saved.T, t.saved_slots
    (array([[ 0,  1, -1,  0, -1,  1],
           [-1,  0,  0,  0,  0, -1]], dtype=int32), (2, 1))
    >>> t.arriving_forward[:, 1, TO_NEXT]  # on stage 1, from stage 0
    array([ 0,  0, -1, -1, -1, -1], dtype=int32)
    """
    shape = len(schedule.ticks), schedule.stages
    kind, microbatch, chunk, virtual = (np.zeros(shape, np.int32) for _ in range(4))
    slot = {name: np.full(shape, -1, np.int32) for name in BUFFERS}
    arriving = {name: np.full((*shape, len(WAYS)), -1, np.int32) for name in ("forward", "cotangent")}
    send = np.full(shape, -1, np.int32)
    lives = lifetimes(schedule)
    numbers = {name: _numbers(schedule, each) for name, each in lives.items()}
    for t, d, i in schedule.instructions():
        _, j, v = schedule.key(d, i)
        kind[t, d], microbatch[t, d], chunk[t, d], virtual[t, d] = code(schedule, i.kind, j, v), j, i.chunk, v
        for name in ("saved", "forward" if i.kind == "F" else "cotangent"):
            slot[name][t, d] = numbers[name].get((j, v), -1)
    used: tuple[set, set] = set(), set()
    for side, j, v, source, destination in sends(schedule):
        name, by = "forward" if side == "F" else "cotangent", way(side, source, destination, schedule.stages)
        send[schedule.where[side, j, v - 1 if side == "F" else v + 1], source] = by
        arriving[name][lives[name][j, v][0] - 1, destination, by] = numbers[name][j, v]
        if by != TO_SELF:
            used[by].add((source, destination))
    counts = slot_counts(schedule)
    return Tables(
        latency=schedule.latency,
        kind=kind,
        microbatch=microbatch,
        chunk=chunk,
        virtual=virtual,
        saved=slot["saved"],
        forward=slot["forward"],
        cotangent=slot["cotangent"],
        arriving_forward=arriving["forward"],
        arriving_cotangent=arriving["cotangent"],
        send=send,
        permutations=(tuple(sorted(used[0])), tuple(sorted(used[1]))),
        saved_slots=counts["saved"],
        forward_slots=counts["forward"],
        cotangent_slots=counts["cotangent"],
    )


def code(schedule: Schedule, kind: str, microbatch: int, virtual: int) -> int:
    """B is BACKWARD, or BACKWARD_INPUTS where a W follows."""
    if kind == "B" and ("W", microbatch, virtual) in schedule.where:
        return BACKWARD_INPUTS
    return {"F": FORWARD, "B": BACKWARD, "W": BACKWARD_WEIGHTS}[kind]


def _numbers(schedule: Schedule, lives: Mapping) -> dict[tuple[int, int], int]:
    by_stage: dict[int, list] = defaultdict(list)
    for key in lives:
        by_stage[schedule.homes[key[1]][0]].append(key)
    return {
        key: number
        for keys in by_stage.values()
        for key, number in zip(keys, color([lives[key] for key in keys]), strict=True)
    }


def _counts(schedule: Schedule, numbers: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    counts = [0] * schedule.stages
    for (_, virtual), number in numbers.items():
        d = schedule.homes[virtual][0]
        counts[d] = max(counts[d], number + 1)
    return tuple(counts)


def check_buffers(schedule: Schedule, limits: Mapping[str, int]) -> None:
    """Raises ValueError where a stage holds more than `limits` allow: {"saved": 4} means that no stage keeps
    the results of more than 4 forward passes at once; "forward" and "cotangent" are what has arrived and
    waits.
    """
    lives = lifetimes(schedule)
    for name, limit in limits.items():
        if name not in lives:
            raise ValueError(f"limit on {name!r}; expected one on {', '.join(lives)}")
        for d in range(schedule.stages):
            mine = sorted((live, key) for key, live in lives[name].items() if schedule.homes[key[1]][0] == d)
            for (tick, _), (microbatch, virtual) in mine:
                held = sum(begin <= tick <= end for (begin, end), _ in mine)
                if held > limit:
                    raise ValueError(_full(schedule, name, d, tick, held, limit, microbatch, virtual))


def _full(
    schedule: Schedule, name: str, d: int, tick: int, held: int, limit: int, j: int, virtual: int
) -> str:
    i = Instruction("B" if name == "cotangent" else "F", j, schedule.homes[virtual][1])
    what = {"saved": "results for backward passes", "forward": "activations", "cotangent": "cotangents"}[name]
    return (
        f"{schedule.name}: stage {d} keeps {held} {what} in tick {tick}, with that for {i}; {limit} are "
        f"allowed. Run a backward pass before {i}, or allow more"
    )

"""Seconds and bytes of schedules: formulas, unequal stages, the choice by a limit."""

import random

import pytest

from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.simulate import Costs, choose, simulate
from shardax.pipeline.slots import lifetimes, tables

pytestmark = pytest.mark.quick

UNEQUAL = [(1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.7), (1.3, 1, 0.9), (1, 2, 1)]


def lost(name, p, m, costs):
    """Seconds beyond the work of a stage, and those that a stage waits within its own time."""
    v = NAMES[name].chunks
    each = Costs(*(cost / v for cost in costs))
    done = simulate(make_schedule(name, p, m), each, locked=False)
    return done.seconds - m * sum(costs), max(done.waits)


@pytest.mark.parametrize("costs", UNEQUAL)
@pytest.mark.parametrize("p, m", [(2, 5), (4, 12), (6, 20)])
def test_formulas_of_the_papers(p, m, costs):
    f, b, w = costs
    ideal = (p - 1) * (f + b + w)
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        assert lost(name, p, m, costs)[0] == pytest.approx(ideal)
    for name in ("circular", "interleaved"):
        assert lost(name, p, m, costs)[0] == pytest.approx(ideal / 2)
    assert lost("zb-h1", p, m, costs)[0] == pytest.approx((p - 1) * max(f, f + b - w))
    assert lost("zb-h2", p, m, costs)[1] == pytest.approx((p - 1) * (f + b - 2 * w))


@pytest.mark.parametrize("costs", UNEQUAL)
@pytest.mark.parametrize("p, m, v", [(2, 5, 1), (4, 12, 1), (4, 13, 2), (3, 7, 3)])
def test_aligned_schedules_lose_nothing_to_locked_ticks(p, m, v, costs):
    f, b, w = costs
    each = Costs(f / v, b / v, w / v)
    whole = make_schedule("interleaved" if v > 1 else "eager-1f1b", p, m, v)
    split = make_schedule("zb-eager", p, m, v)
    assert simulate(whole, each).seconds - m * (f + b + w) == pytest.approx((p - 1) * (f + b + w) / v)
    assert simulate(split, each).seconds - m * (f + b + w) == pytest.approx((p - 1) * (f + b) / v)
    assert max(tables(whole).saved_slots) == max(tables(split).saved_slots)


def test_zbv_waits_for_nothing_where_all_take_the_same_time():
    assert lost("zbv", 4, 12, (2, 2, 2)) == pytest.approx((3, 0))


def test_locked_ticks_last_as_long_as_their_longest_instruction():
    """1f1b runs F beside B; what runs one kind in a tick loses nothing."""
    for p, m in ((4, 8), (3, 7)):
        seconds = {name: simulate(make_schedule(name, p, m), Costs(1, 1, 1)).seconds for name in NAMES}
        assert seconds["gpipe"] == seconds["eager-1f1b"] == 3 * (m + p - 1)
        assert seconds["1f1b"] == 4 * (m + p - 1) - p  # in the first p ticks, F alone
        assert seconds["zb-h1"] == 3 * m + p - 1
        assert seconds["interleaved"] == 3 * (2 * m + p - 1)


def test_sends_take_time_or_overlap():
    p, m = 4, 12
    for locked in (False, True):
        late = [
            simulate(make_schedule("eager-1f1b", p, m, latency=n), Costs(1, 1, 1, send=0.5), locked=locked)
            for n in (1, 2)
        ]
        free = simulate(make_schedule("eager-1f1b", p, m), Costs(1, 1, 1), locked=locked)
        assert late[0].seconds > late[1].seconds > free.seconds
        assert len(late[0].sent) == 2 * m * (p - 1)
    after = 2 * (m + p - 1) - 1  # no send follows the last tick
    assert (
        simulate(make_schedule("gpipe", p, m), Costs(1, 1, 1, send=0.5)).seconds
        == 3 * (m + p - 1) + 0.5 * after
    )
    assert simulate(make_schedule("gpipe", 1, m), Costs(1, 1, 1, send=0.5)).seconds == 3 * m


def test_a_send_longer_than_a_tick_bounds_it():
    done = simulate(make_schedule("forward", 3, 5, latency=2), Costs(1, send=4))
    assert done.seconds == 4 * (len(done.schedule.ticks) - 1) + 1


def longest_path(schedule, costs):
    """By relaxation over all edges, until nothing changes."""
    where = {schedule.key(d, i): (d, i) for _, d, i in schedule.instructions()}
    before = {}
    for d, order in enumerate(schedule.orders):
        keys = [schedule.key(d, i) for i in order if i]
        before |= dict(zip(keys[1:], keys, strict=False))

    def took(key):
        kind, j, v = key
        if kind == "B" and ("W", j, v) not in where:
            return costs.inputs[v] + costs.weights[v]
        return {"F": costs.forward, "B": costs.inputs, "W": costs.weights}[kind][v]

    end = dict.fromkeys(where, 0.0)
    while True:
        new = {}
        for key, (d, _) in where.items():
            arrivals = [end[n] + costs.send * (where[n][0] != d) for n in schedule.needs(key)]
            new[key] = max([0.0, end.get(before.get(key), 0.0), *arrivals]) + took(key)
        if new == end:
            return max(end.values())
        end = new


def test_unequal_stages_take_the_longest_path():
    rng = random.Random(0)
    for name in NAMES:
        p, m = rng.randint(1, 4), rng.randint(1, 6)
        schedule = make_schedule(name, p, m, latency=2)
        n = schedule.virtual_stages
        costs = Costs(*([rng.choice((1.0, 1.5, 2.0, 2.5)) for _ in range(n)] for _ in range(3)), send=0.25)
        assert simulate(schedule, costs, locked=False).seconds == longest_path(schedule, costs), name


def test_memory_is_that_of_the_slots():
    """Bytes live at once, in seconds where every instruction takes one, are slots at once, in ticks."""
    for name in NAMES:
        schedule = make_schedule(name, 4, 9)
        done = simulate(schedule, Costs(1, 1, 1, backward=1, saved=10))
        assert done.peaks == tuple(10 * slots for slots in tables(schedule).saved_slots)
        for d in range(4):
            memory = done.memory(d)
            assert memory[-1][1] == 0 and max(held for _, held in memory) == done.peaks[d]


def test_memory_of_what_waits():
    """With nothing saved, the input of each virtual stage is, and what has arrived."""
    schedule = make_schedule("1f1b", 4, 9)
    done = simulate(schedule, Costs(1, 1, 1, backward=1, saved=0, boundary=1))
    lives = [live for each in lifetimes(schedule).values() for (_, v), live in each.items() if v == 0]
    most = max(sum(begin <= t <= end for begin, end in lives) for t in range(len(schedule.ticks)))
    assert done.peaks[0] == most == 5


def test_one_program_needs_the_largest_buffers():
    """Its slots hold what the largest stage keeps, as many as the stage with most has."""
    costs, schedule = Costs(1, 1, 1, saved=(1, 2, 3, 4), boundary=0.5), make_schedule("1f1b", 4, 9)
    slots = [
        max(n)
        for n in (
            tables(schedule).saved_slots,
            tables(schedule).forward_slots,
            tables(schedule).cotangent_slots,
        )
    ]
    assert simulate(schedule, costs).kept == slots[0] * 4.5 + (slots[1] + slots[2]) * 0.5 == 19
    assert simulate(schedule, costs, locked=False).kept < 19


def test_costs_are_grouped_by_layers():
    costs = Costs((1, 2, 3, 4, 5), saved=(1, 1, 1, 1, 2), boundary=7).grouped(5, 2)
    assert costs.forward == (3, 12) and costs.saved == (2, 4) and costs.backward == (4, 6)
    assert costs.boundary == 7
    with pytest.raises(ValueError, match="Costs.forward has 2 numbers; expected one, or 3"):
        Costs((1, 2)).spread(3)
    with pytest.raises(ValueError, match="Costs.weights has -1; expected seconds or bytes of 0 or more"):
        Costs(weights=-1).spread(3)


def test_the_choice_is_the_fastest_that_fits():
    costs = Costs(1, 1, 1, saved=1)
    free = choose(4, 16, 16, costs)
    seconds = [c.simulation.seconds for c in free.candidates]
    assert free.schedule is free.candidates[0].schedule and seconds == sorted(seconds)
    assert {c.schedule.chunks for c in free.candidates if c.schedule.name == "interleaved"} == {2, 4}
    limited = choose(4, 16, 16, costs, limit=16)
    assert limited.schedule.name == "zbv" and [c.fits for c in limited.candidates] == [
        c.simulation.kept <= 16 for c in free.candidates
    ]
    assert "-> zbv" in str(limited) and "(over the limit)" in str(limited)
    assert {c.schedule.chunks for c in choose(4, 16, 16, costs, chunks=2).candidates} == {2}
    assert choose(4, 16, 6, costs).schedule.chunks == 1  # no other number divides the layers
    assert choose(4, 16, 16, Costs(1, 2, 3), backward=False).schedule.name == "forward"


def test_the_clock_decides():
    """Whole backward passes that last long beside forward ones cost a locked program more."""
    names = "1f1b", "eager-1f1b"
    assert choose(4, 16, 4, Costs(1, 1, 1), names=names).schedule.name == "eager-1f1b"
    assert choose(4, 16, 4, Costs(1, 1, 1), names=names, locked=False).schedule.name == "1f1b"


def test_errors_of_the_choice():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages; use 3 stages or fewer"):
        choose(4, 8, 3)
    with pytest.raises(
        ValueError, match="none of 1f1b, interleaved runs 16 layers on 4 stages with chunks=3; expected"
    ):
        choose(4, 8, 16, chunks=3, names=("1f1b", "interleaved"))
    with pytest.raises(
        ValueError, match=r"no schedule .* keeps within 3 bytes on a stage; naive needs the fewest, 4\. Use"
    ):
        choose(4, 8, 16, limit=3)

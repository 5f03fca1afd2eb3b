"""Which branch of a pipelined program each stage runs in each tick, and what share of the ticks is idle."""

from collections.abc import Sequence

import numpy as np

from benchmarks.hlo_cost import Cost
from shardax.cost.chips import Chip
from shardax.pipeline import slots
from shardax.pipeline.table import Schedule


def branch_table(schedule: Schedule) -> np.ndarray:
    """The numbers of the branches, [ticks, stages], as `shardax.pipeline.execute` numbers them: 0 is idle,
    the others are numbered as they come. The first virtual stage and the last have branches of their own, the
    others share one for each chunk.

    >>> from shardax.pipeline.schedules import make_schedule
    >>> branch_table(make_schedule("gpipe", 2, 2)).tolist()
    [[1, 0], [1, 2], [0, 2], [0, 3], [4, 3], [4, 0]]
    """
    tables = slots.tables(schedule)
    known: dict[tuple[int, ...], int] = {}
    numbers = np.zeros(tables.kind.shape, int)
    for place in zip(*np.nonzero(tables.kind != slots.IDLE), strict=True):
        k = int(tables.virtual[place])
        ends = k == 0, k == schedule.virtual_stages - 1
        chunk = k // schedule.stages
        numbers[place] = known.setdefault((int(tables.kind[place]), *ends, chunk), len(known) + 1)
    return numbers


def bubbles(table: np.ndarray, branches: Sequence[Cost], chip: Chip) -> float:
    """The share of the ticks' seconds that stages wait, 0 to 1; a tick is as long as its longest branch."""
    seconds = np.array([branch.seconds(chip) for branch in branches])[table]
    return 1 - seconds.mean(1).sum() / seconds.max(1).sum()

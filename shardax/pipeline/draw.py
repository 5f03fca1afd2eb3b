"""A schedule as a picture: ticks × stages, a colour for each kind of instruction, microbatches in them."""

from pathlib import Path
from typing import TYPE_CHECKING

from shardax.pipeline.slots import tables
from shardax.pipeline.table import Schedule
from shardax.pipeline.timeline import COLORS, WORDS, color, ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERED = 160  # ticks; with more, numbers would not be legible
WIDEST = 40.0  # inches


def draw(schedule: Schedule, file: str | Path | None = None) -> "Figure":
    """A matplotlib Figure of the schedule, written to `file` (its ending says in which format) if there is
    one.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("to draw needs matplotlib: pip install 'shardax[viz]'") from None
    ticks = len(schedule.ticks)
    figure = Figure(figsize=(min(WIDEST, 1.6 + 0.27 * max(ticks, 16)), 1.3 + 0.32 * schedule.stages), dpi=120)
    axes = figure.add_subplot()
    for t, d, i in schedule.instructions():
        axes.barh(d, 1, left=t, height=0.92, color=color(i), edgecolor="white", linewidth=0.8)
        if ticks <= NUMBERED:
            axes.text(t + 0.5, d, str(i.microbatch), ha="center", va="center", color=ink(i), fontsize=7)
    axes.set(xlim=(0, ticks), ylim=(schedule.stages - 0.5, -0.5), title=title(schedule))
    axes.set_yticks(range(schedule.stages), [f"stage {d}" for d in range(schedule.stages)])
    axes.set_facecolor("#eef0f4")
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.title.set_fontsize(9)
    axes.set_xlabel("tick" + ", paler: later chunks" * (schedule.chunks > 1), fontsize=8)
    used = {i.kind for _, _, i in schedule.instructions()}
    handles = [axes.barh(0, 0, color=COLORS[kind], label=WORDS[kind]) for kind in "FBW" if kind in used]
    figure.legend(handles=handles, loc="lower right", ncols=3, fontsize=7, frameon=False)
    figure.tight_layout()
    if file is not None:
        figure.savefig(file)
    return figure


def title(schedule: Schedule) -> str:
    """What the picture is of."""
    kept = max(tables(schedule).saved_slots)
    return f"{schedule.sizes}, {len(schedule.ticks)} ticks, {100 * schedule.bubble:.1f} % idle, keeps {kept}"

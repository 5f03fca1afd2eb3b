"""What the main job shows: progress, a plot of the losses, and a sample of text."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[int, float, float], None]  # steps done, loss, tokens/s


@contextmanager
def by_first_process() -> Iterator[None]:
    """Of several processes, which say the same, the first is heard. Errors are heard from all."""
    if jax.process_index() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def progress(name: str, steps: int) -> Iterator[Update]:
    """A bar on a terminal, about ten lines elsewhere."""
    console = Console()
    if not console.is_terminal:

        def print_line(done: int, loss: float, speed: float) -> None:
            if done in (1, steps) or done % max(1, steps // 10) == 0:
                print(f"{name}: step {done}/{steps}  {_numbers(loss, speed)}", flush=True)

        yield print_line
        return
    columns = (
        TextColumn("{task.description}: step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, numbers="compiling")
        yield lambda done, loss, speed: bar.update(task, completed=done, numbers=_numbers(loss, speed))


def _numbers(loss: float, speed: float) -> str:
    return f"loss {loss:.4f}" + (f"  {speed:,.0f} tokens/s" if speed else "")


def write_plan(plan: Any, folder: Path) -> list[Path]:
    """Writes a plan as text and as a page, and returns the files."""
    files = [folder / "plan.txt", folder / "plan.html"]
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        files[0].write_text(plan.text() + "\n", encoding="utf-8")
        plan.to_html(files[1])
    return files


def plot_losses(
    curves: Mapping[str, Sequence[float]], path: Path, held_out: Mapping[int, float] | None = None
) -> None:
    """Writes the curves as a PNG: under another name first, so that no reader meets half a file.

    Args:
      curves: the losses of the first step and those that follow, by name.
      path: of the PNG.
      held_out: losses by the number of steps before.
    """
    if jax.process_index() > 0:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="loss, nats a token", title="GPT-2 on the Python standard library"
    )
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "o-", label="held-out text", markersize=4)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    figure.savefig(beside, format="png", dpi=120)
    os.replace(beside, path)


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two curves.

    >>> largest_difference([1.0, 2.0], [1.0, 2.5])
    0.2
    """
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(some, others, strict=True))


def indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())

"""Kills the main job and starts it again, until it is through: `python -m tests.kill --kills 20 --seed 0`.

Each start is on another mesh. What must hold: nothing that was saved is lost, and the curve of losses is that
of a run which nobody killed.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from models.report import largest_difference

STEPS, SAVE_EVERY = 120, 10
MESHES = ("data=4,model=2", "data=2,model=2", "data=2,fsdp=2,model=2")
STARTING, STEPPING = 6.0, 0.3  # seconds: about what a start takes, and some steps
LINES = 10  # that a run prints as it trains
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in survive(options.kills, options.seed, Path(folder)):
            print(line, flush=True)


def survive(kills: int, seed: int, folder: Path) -> Iterator[str]:
    """Says what happened, a line each; AssertionError where something was lost."""
    chance = random.Random(seed)
    kept, meshes, saved, killed = folder / "killed", cycle(MESHES), 0, 0
    while killed < kills:
        lines = run_and_kill(next(meshes), kept, chance)
        begun, done = went_on_after(lines), steps_done(lines)
        assert begun is None or begun == saved, f"{saved} steps were saved, and it goes on after {begun}"
        before, saved = saved, newest(kept)
        assert saved >= before, f"{before} steps were saved before, {saved} now"
        assert saved >= done - 2 * SAVE_EVERY, f"{done} steps done, {saved} saved, of every {SAVE_EVERY}"
        killed += 1
        yield f"kill {killed}: at step {done} or later, {saved} saved"
        if saved == STEPS:
            kept = kept.with_name(f"{kept.name}-again")
            saved = 0
    finished = read(kept, run(next(meshes), kept))
    whole = read(folder / "whole", run(MESHES[0], folder / "whole"))
    assert len(finished) == len(whole) == STEPS
    difference = largest_difference(finished, whole)
    assert difference < TOLERANCE, f"the losses differ by {difference:.1e}"
    yield (
        f"after {killed} kills: {STEPS} losses, no further than {difference:.1e} from those of a run that "
        "nobody killed"
    )


def command(mesh: str, kept: Path) -> list[str]:
    tiny = ["--size", "tiny", "--batch", "8", "--seq", "32", "--steps", str(STEPS), "--mesh", mesh]
    out = [
        "--out",
        str(kept.with_suffix(".png")),
        "--checkpoints",
        str(kept),
        "--save-every",
        str(SAVE_EVERY),
    ]
    return [sys.executable, "-m", "models.train", *tiny, *out]


def run(mesh: str, kept: Path) -> str:
    return subprocess.run(command(mesh, kept), check=True, capture_output=True, text=True).stdout


def run_and_kill(mesh: str, kept: Path, chance: random.Random) -> list[str]:
    """One in four is killed somewhere in starting and compiling; the others after so many lines and a
    moment.
    """
    starting = chance.random() < 0.25
    with subprocess.Popen(command(mesh, kept), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [] if starting else list(islice(process.stdout, chance.randint(2, LINES)))
        _wait(process, chance.uniform(0, STARTING if starting else STEPPING))
        process.send_signal(signal.SIGKILL)
        return [*lines, *process.stdout]


def _wait(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass


def went_on_after(lines: Sequence[str]) -> int | None:
    found = re.search(r"goes on after step (\d+)", "\n".join(lines))
    return int(found[1]) if found else None


def steps_done(lines: Sequence[str]) -> int:
    return max(map(int, re.findall(r"step (\d+)/", "\n".join(lines))), default=0)


def newest(kept: Path) -> int:
    """The last step that is saved whole: orbax renames a folder when all is in it."""
    return max((int(path.name) for path in kept.glob("*") if path.name.isdecimal()), default=0)


def read(kept: Path, printed: str) -> list[float]:
    """The losses in the newest of the saved states, of a run that printed this."""
    assert f"step {STEPS}/{STEPS}" in printed or f"goes on after step {STEPS}" in printed
    return saved_log(kept)["losses"]


def saved_log(kept: Path) -> dict[str, Any]:
    return json.loads((kept / str(newest(kept)) / "log" / "metadata").read_text())


if __name__ == "__main__":
    main()

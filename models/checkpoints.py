"""The states of a run, saved by orbax as it trains: asynchronously, each whole or not there, the newest two
kept.

A run that was killed goes on from the newest, on any mesh and any number of processes, and its curve of
losses is whole.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import orbax.checkpoint as ocp

KEPT = 2


class Checkpoints:
    """`settings` are what the curve depends on: a run with others must not go on from these states.

    Used in a `with`: at its end, the last save is on disk.
    """

    def __init__(
        self, folder: Path, every: int, settings: Mapping[str, Any], stop: Callable[[str], NoReturn]
    ):
        self._folder, self._settings, self._stop = folder, dict(settings), stop
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, save_interval_steps=every, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an error nothing is waited for: other processes may be gone, and what is half saved does not
        count.
        """
        if error is None:
            self._manager.close()

    def newest(self, state: Any) -> tuple[Any, list[float]] | None:
        """The newest state and the losses until then; None where nothing is saved. `state`: what it is laid
        out as.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        log = self._manager.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore()))["log"]
        for name, value in self._settings.items():
            saved = log["settings"].get(name)
            if saved != value:
                self._stop(
                    f"--checkpoints {self._folder} holds a run with --{name} {saved}, and this one has "
                    f"{value}: name another folder, or train on as it was begun"
                )
        return self.at(step, state), log["losses"]

    def at(self, step: int, state: Any) -> Any:
        """The state after `step` steps, which is saved."""
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state)))[
            "state"
        ]

    def save(self, state: Any, losses: Sequence[float], last: bool) -> None:
        """Begins to save the state, if it is this step's turn. `losses` has one for each step so far."""
        if last and self._manager.latest_step() == len(losses):
            return
        log = {"settings": self._settings, "losses": list(losses)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), log=ocp.args.JsonSave(log))
        self._manager.save(len(losses), args=args, force=last)

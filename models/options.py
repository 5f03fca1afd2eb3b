"""The main job's command line. Its errors are one line each."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from models import gpt2
from models.gpt2_sharding import AXES, Offload

PARTITIONERS = ("shardax", "xla", "both")
OFFLOADS: Mapping[str, Offload] = {
    "optimizer": ("optimizer",),
    "parameters": ("parameters",),
    "both": ("optimizer", "parameters"),
}


@dataclass(frozen=True)
class Options:
    mesh: Mapping[str, int] | None  # None: all devices, model=2 if their number is even
    size: str
    steps: int
    batch: int
    seq: int
    rate: float
    dropout: float
    zero: int
    offload: str | None
    seed: int
    compare: bool
    partitioner: str
    schedule: str | None
    microbatches: int
    out: Path
    checkpoints: Path | None
    save_every: int
    coordinator: str | None
    processes: int
    process: int
    cluster: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    options = Options(**vars(_parser().parse_args(argv)))
    if options.compare and options.partitioner == "both":
        stop("--compare trains by one partitioner: name it, --partitioner shardax or xla")
    if options.checkpoints and options.partitioner == "both":
        stop("--checkpoints keeps the states of one partitioner: name it, --partitioner shardax or xla")
    if options.zero and options.partitioner == "xla":
        stop("--zero is a transform of shardax: leave it out, or name --partitioner shardax")
    if options.offload and not options.zero:
        stop("--offload is of ZeRO's state: name its stage, --zero 3")
    if options.checkpoints and options.checkpoints.is_file():
        stop(f"--checkpoints {options.checkpoints} is a file: name a folder")
    if options.cluster and options.coordinator:
        stop("--cluster finds the coordinator itself: leave --coordinator out, or --cluster")
    if (options.processes > 1) != (options.coordinator is not None):
        stop(
            "--processes and --coordinator go together: --coordinator 127.0.0.1:7000 --processes 2 "
            "--process 0"
        )
    if options.process >= options.processes:
        stop(
            f"--process {options.process} is not one of 0 to {options.processes - 1}, as --processes "
            f"{options.processes} has it"
        )
    _check_pipeline(options)
    if options.out.is_dir():
        stop(f"--out {options.out} is a folder: name a file, {options.out / 'loss.png'}")
    return options


def _check_pipeline(options: Options) -> None:
    on_stages = "stage" in (options.mesh or {})
    if on_stages != (options.schedule is not None):
        stop("--schedule and an axis of stages go together: --mesh stage=4,data=2 --schedule 1f1b")
    if on_stages and options.partitioner != "shardax":
        stop("--schedule is shardax's own: --partitioner shardax")
    if on_stages and options.batch % options.microbatches:
        stop(f"--microbatches {options.microbatches} does not divide --batch {options.batch}")
    if on_stages and options.dropout and options.compare:
        stop("--compare with --dropout: each microbatch has masks of its own; leave one of the two out")


def stop(message: str) -> NoReturn:
    raise SystemExit(f"train: {message}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train",
        description="Trains a GPT-2 on the Python standard library's source files.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--mesh",
        type=mesh_shape,
        metavar="data=4,model=2",
        help="axes, of stage, data, fsdp and model (default: all devices)",
    )
    add("--size", choices=list(gpt2.SIZES), default="default", help="of the model")
    add("--steps", type=_at_least(1), default=200)
    add("--batch", type=_at_least(1), default=16, help="sequences a step")
    add("--seq", type=_at_least(1), default=128, help="tokens a sequence")
    add("--rate", type=float, default=1e-3, help="peak of the learning rate")
    add("--dropout", type=_fraction, default=0.0)
    add(
        "--zero",
        type=int,
        choices=range(4),
        default=0,
        help="what rests split over the axis data: 1 optimizer state, 2 and gradients, 3 and parameters",
    )
    add(
        "--offload",
        choices=OFFLOADS,
        help="what of the state rests in the host's memory, with --zero (default: nothing)",
    )
    add("--seed", type=_at_least(0), default=0)
    add(
        "--compare",
        action="store_true",
        help="train by plain jax.jit on one device too, and compare the losses",
    )
    add(
        "--partitioner",
        choices=PARTITIONERS,
        default="shardax",
        help="xla: jax.jit with the same shardings; both: their speeds, --zero 3 beside fsdp by annotation",
    )
    add("--schedule", help="1f1b, gpipe, ...: layers lie on the stages of --mesh stage=4,data=2")
    add("--microbatches", type=_at_least(1), default=8, help="of a batch, where there is a schedule")
    add("--out", type=Path, default=Path("out/loss.png"), help="the plot of the loss")
    add(
        "--checkpoints",
        type=Path,
        help="a folder: the state is saved there, and a run goes on from the newest",
    )
    add("--save-every", type=_at_least(1), default=50, help="steps between saves")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where the job runs as several processes")
    add("--processes", type=_at_least(1), default=1, help="how many there are")
    add("--process", type=_at_least(0), default=0, help="which of them this is")
    add(
        "--cluster",
        action="store_true",
        help="several processes, as the cluster's own environment says (TPU pods, Slurm)",
    )
    return parser


def mesh_shape(text: str) -> dict[str, int]:
    """The axes and sizes of a mesh.

    >>> mesh_shape("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    shape: dict[str, int] = {}
    for word in text.split(","):
        axis, _, size = word.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"'{word}' is not of the form axis=size, with an axis of {', '.join(AXES)}"
            )
        if axis in shape:
            raise argparse.ArgumentTypeError(f"axis {axis} is named twice in '{text}'")
        shape[axis] = int(size)
    return shape


def _at_least(least: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer of at least {least}")
        return int(text)

    return parse_integer


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to below 1")
    return value

"""Options: what a user may decide about how programs are made. Every field has a documented default."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from shardax.cost.chips import CHIPS, NOMINAL, SLOW, Chip
from shardax.validation import is_integer

PASSES = ("dead", "share", "combine", "streamed", "cpu", "tpu")
_CHIPS = CHIPS | {"slow": SLOW}


@dataclass(frozen=True)
class Options:
    """Frozen and hashable; the same options and the same program give the same plan.

    strict (False): what to do about what nobody asked for. That is a primitive without a rule, which runs
      replicated, and the collectives that bring an operand to the sharding that its primitive needs. It is
      not what annotations ask for, the sums that split contractions owe, or what halos and scans exchange.
      False: the primitive warns. "warn": both warn, once for each line of the user's. True: both are refused
      with a ValueError. See `docs/strict.md`.
    max_gather_bytes (None): the largest array, in bytes on each device, that an all_gather may make, asked
      for or not. Larger ones are refused; with `strict="warn"` they warn.
    allow (()): what is exempt from both, as patterns with the wildcards of file names: primitives ("sort"),
      collectives ("all_to_all"), or the user's lines ("*/gpt2.py:41").
    chip (None): the chip for whose prices programs are chosen: one of "v3", "v4", "v5e", "v5p", "v6e",
      "H100", "H200", a `shardax.cost.chips.Chip`, or "devices": that of the mesh. Where the mesh's devices
      are that chip, their places say which axes run over which links. None: a nominal chip, all devices
      equally near, so that one program is chosen everywhere. "slow": one on which whatever can be split is,
      however small, to test what rules and kernels do then.
    passes ("dead", "share", "combine", "streamed", "cpu", "tpu"): the passes over the local program, in their
      order: names of shardax's own, and functions of yours (`shardax.Pass`). One that is left out does not
      run. "dead" drops what nothing reads, "share" sends once what two readers want, "combine" makes one of
      small reductions, "streamed" updates what rests in the host's memory block by block, and brings it to
      unrolled code one array ahead; "cpu" and "tpu" avoid what XLA does wrong or badly there, where a program
      is lowered for it.
    idle_axes (True): an operation may be split over any axis of the mesh, wherever that takes less time: also
      over one that splits nothing around it. "near": only over those that its operands and results have,
      along any dim. False: only as shardings of these suggest.

    Raises ValueError for other values.

    >>> Options(strict=True, allow=("sort",))
    Options(strict=True, max_gather_bytes=None, allow=('sort',))
    """

    strict: bool | Literal["warn"] = False
    max_gather_bytes: int | None = None
    allow: tuple[str, ...] = ()
    chip: Chip | str | None = field(default=None, repr=False)
    passes: tuple[Any, ...] = field(default=PASSES, repr=False)
    idle_axes: bool | Literal["near"] = field(default=True, repr=False)

    def __post_init__(self):
        if not isinstance(self.strict, bool | str) or self.strict not in (False, True, "warn"):
            raise ValueError(f'Options(strict={self.strict!r}): must be False, "warn" or True')
        if self.max_gather_bytes is not None and not is_integer(self.max_gather_bytes, 0):
            raise ValueError(
                f"Options(max_gather_bytes={self.max_gather_bytes!r}): must be a number of bytes, or None"
            )
        if not isinstance(self.allow, tuple) or not all(isinstance(pattern, str) for pattern in self.allow):
            raise ValueError(f"Options(allow={self.allow!r}): must be a tuple of patterns, such as ('sort',)")
        if not isinstance(self.idle_axes, bool) and self.idle_axes != "near":
            raise ValueError(f'Options(idle_axes={self.idle_axes!r}): must be True, "near" or False')
        is_tuple = isinstance(self.passes, tuple)
        if not is_tuple or not all(callable(x) or x in PASSES for x in self.passes):
            raise ValueError(
                f"Options(passes={self.passes!r}): must be a tuple of functions and of {', '.join(PASSES)}"
            )
        if not (self.chip is None or isinstance(self.chip, Chip) or self.chip in ("devices", *_CHIPS)):
            choices = ", ".join(f'"{name}"' for name in (*_CHIPS, "devices"))
            raise ValueError(
                f"Options(chip={self.chip!r}): must be one of {choices}, a shardax.cost.chips.Chip, or None"
            )

    @property
    def priced_for(self) -> Chip | None:
        """The chip whose prices count, None: that of the mesh's devices."""
        if isinstance(self.chip, str):
            return _CHIPS.get(self.chip)
        return self.chip or NOMINAL


_IN_EFFECT: ContextVar[Options] = ContextVar("options", default=Options())  # noqa: B039


@contextmanager
def in_effect(options: Options) -> Iterator[None]:
    """What is traced inside is to be sharded with these options."""
    token = _IN_EFFECT.set(options)
    try:
        yield
    finally:
        _IN_EFFECT.reset(token)


def current() -> Options:
    """Those of the function that is being traced, the default ones where none is."""
    return _IN_EFFECT.get()


class Refused(ValueError):
    """Raised where `Options` refuse a program. If `.plan` raised it, `error.plan` is the plan that was
    refused.
    """

    plan: Any = None

"""What the executor runs: of each virtual stage the passes, as functions, and where what they make goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax.pipeline.begins import Begin

Type = jax.ShapeDtypeStruct


class Inputs(NamedTuple):
    """What a pass reads: the stage's pieces of the parameters, the rows of the microbatch, what all
    microbatches get as it is, the microbatch's number; of wires, what comes from the stage before and from
    the one after; what the forward pass kept, and what B held for W.
    """

    pieces: Sequence[Any]
    batch: Sequence[Any]
    rest: Sequence[Any]
    microbatch: Any
    received: Sequence[Any]
    returned: Sequence[Any]
    kept: Sequence[Any]
    held: Sequence[Any]
    totals: Sequence[Any] = ()


class Outputs(NamedTuple):
    """What a pass makes: for the next stage, or of a backward pass for the one before; for its own backward
    pass; of B for W; summands; rows of results; the sums to which it has added. A list that is empty where it
    could have elements: none.
    """

    sent: Sequence[Any] = ()
    kept: Sequence[Any] = ()
    held: Sequence[Any] = ()
    sums: Sequence[Any] = ()
    rows: Sequence[Any] = ()
    totals: Sequence[Any] = ()


@dataclass(frozen=True)
class Pass:
    """`sums`, `rows`: the numbers of those in the program, `totals`: of the sums to which it adds by itself.
    `alike`: equal for passes that are the same programs. `closed`: its jaxpr, of which the costs are
    estimated.
    """

    run: Callable[[Inputs], Outputs]
    sums: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    alike: Any = None
    closed: Any = None
    totals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Passes:
    """Of one virtual stage: `of` each kind of instruction (`slots.FORWARD`, ...) its pass, and the types of
    what is received from the stage before, returned to it, kept and held.
    """

    of: Mapping[int, Pass]
    received: tuple[Type, ...]
    returned: tuple[Type, ...]
    kept: tuple[Type, ...]
    held: tuple[Type, ...] = ()


@dataclass(frozen=True)
class Program:
    """All virtual stages' passes, and the types of what they add up and of a row of each result.

    For the plan: `name`, of the function; `lines`, the first of each virtual stage; `begins`, why each but
    the first begins where it does; `chosen`, how the schedule was.
    """

    passes: tuple[Passes, ...]
    sums: tuple[Type, ...]
    results: tuple[Type, ...]
    name: str = "the step"
    lines: tuple[str, ...] = ()
    begins: tuple[Begin, ...] = ()
    chosen: str = ""

    def gradients(self, k: int) -> tuple[int, ...]:
        """The numbers of the sums to which virtual stage k adds, scalars excepted."""
        numbers = {i for each in self.passes[k].of.values() for i in (*each.sums, *each.totals)}
        return tuple(sorted(i for i in numbers if self.sums[i].shape))


def accumulated(x) -> Any:
    """The dtype in which numbers of this one are added up.

    >>> accumulated(jnp.zeros(3, "bfloat16"))
    <class 'jax.numpy.float32'>
    """
    return jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x.dtype

"""Rewrites an FFT over several dims as one along each of them, one after the other.

An FFT over several dims wants all of them whole, and where no batch dim is left to split it is gathered, and every device does
all of it. One along each dim leaves the others to be split: an array that is split comes and goes by all_to_alls, each device
with its part. Whole it is faster, so the program is built both ways only where an FFT sends something.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import FftType

from shardax import _jax
from shardax.equations import instead_of
from shardax.partition.decisions import Decisions

_OF_OTHER_DIMS = {FftType.RFFT: FftType.FFT, FftType.IRFFT: FftType.IFFT}


def sent(decisions: Decisions) -> bool:
    """Whether some FFT over several dims needs its operand in another layout than that in which it is there."""
    for node, decision in decisions.pairs():
        moved = any(move.source != move.target for move in decision.moves)
        if moved and node.name == "fft" and len(node.params["fft_lengths"]) > 1 or any(map(sent, decision.bodies)):
            return True
    return False


def by_dims(jaxpr) -> Any:
    """The same jaxpr, each FFT over several dims one along each, in bodies too."""
    return _jax.map_eqns(jaxpr, _by_dims)


def _by_dims(eqn):
    if eqn.primitive is not lax.fft_p or len(eqn.params["fft_lengths"]) < 2 or 0 in eqn.params["fft_lengths"]:
        return eqn
    kind, lengths = FftType(eqn.params["fft_type"]), eqn.params["fft_lengths"]
    return instead_of(eqn, jax.jit(lambda x: _one_by_one(x, kind, lengths)))


def _one_by_one(x, kind: FftType, lengths):
    """The last dim, which real transforms make half as long, comes first, or last where it is made long again."""
    dims = range(-1, -len(lengths) - 1, -1)
    for dim in dims if kind != FftType.IRFFT else reversed(dims):
        x = jnp.moveaxis(x, dim, -1)
        x = lax.fft(x, kind if dim == -1 else _OF_OTHER_DIMS.get(kind, kind), (lengths[dim],))
        x = jnp.moveaxis(x, -1, dim)
    return x

"""FLOPs that a lowering notes: the name of the scope around its equations has them, so that kernels of users
count too.
"""

from contextlib import AbstractContextManager

import jax

from shardax import _jax


class Noted(str):
    """The name of a scope around all equations of one lowering, with their FLOPs on one device."""

    flops: float


def scope(name: str, flops: float) -> AbstractContextManager:
    """What is made inside does so many FLOPs in all, once."""
    noted = Noted(name.replace("/", "\\"))
    noted.flops = flops
    return jax.named_scope(noted)


def of(name_stack) -> Noted | None:
    """The outermost note around an equation. Each lowering has a note of its own."""
    return next((name for name in _jax.scope_names(name_stack) if isinstance(name, Noted)), None)

"""What JAX notes of differentiation on the scope around an equation or a node; of what stands in a body, on
that around the whole.
"""

from typing import Any


def is_differentiated(scope: Any) -> bool:
    """Whether it is of a function that is differentiated, forward or backward.

    >>> import jax
    >>> scopes = [eqn.source_info.name_stack for eqn in jax.make_jaxpr(jax.grad(jax.numpy.sin))(1.0).eqns]
    >>> [(is_differentiated(scope), is_transposed(scope)) for scope in scopes]
    [(True, False), (True, False), (True, True)]
    """
    return "jvp(" in str(scope)


def is_transposed(scope: Any) -> bool:
    """Whether it is of a backward pass."""
    return "transpose(" in str(scope)

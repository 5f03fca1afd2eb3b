"""Dense linear algebra: leading batch dims are kept, the matrices themselves are unsplit."""

from collections.abc import Callable

from shardax.graph.graph import Node
from shardax.spmd_rules import flops
from shardax.spmd_rules.registry import LINEAR, register_rule


def batched(core: int) -> Callable[[Node], str]:
    """The rule of a primitive whose first operand has `core` dims of its own behind the batch dims that all
    tensors share.
    """

    def rule(node: Node) -> str:
        return _batched_text(node, len(node.inputs[0].shape) - core)

    return rule


def _batched_text(node: Node, batch: int, kept: str = "") -> str:
    """The first `batch` dims are kept; `kept` names the last dim of the last operand and of the result, if
    that is free too.

    The others are unsplit, and named by place and size: a result's that is like an operand's may be split as
    that is.
    """
    kept_tensors = (node.inputs[-1], node.outputs[0]) if kept else ()

    def text(value) -> str:
        core = [f"w{i}_{n}!" for i, n in enumerate(value.shape[batch:])]
        return " ".join(
            [f"b{i}" for i in range(batch)] + (core[:-1] + [kept] if value in kept_tensors else core)
        )

    return f"{', '.join(map(text, node.inputs))} -> {', '.join(map(text, node.outputs))}"


def triangular_solve(node: Node) -> str:
    """ "b m! m!, b m! n -> b m! n" with a on the left: each column is solved for itself; rows with a on the
    right.
    """
    batch = [f"b{i}" for i in range(len(node.inputs[0].shape) - 2)]
    side = " ".join(batch + (["m!", "n"] if node.params["left_side"] else ["n", "m!"]))
    return f"{' '.join([*batch, 'm!', 'm!'])}, {side} -> {side}"


def tridiagonal_solve(node: Node) -> str:
    """ "b m!, b m!, b m!, b m! n -> b m! n"."""
    return _batched_text(node, len(node.inputs[0].shape) - 1, "n")


_MATRIX = {
    "cholesky": flops.cholesky,
    "eig": flops.eig,
    "eigh": flops.eigh,
    "geqp3": flops.reflections,
    "geqrf": flops.reflections,
    "hessenberg": flops.hessenberg,
    "householder_product": flops.householder_product,
    "lu": flops.lu,
    "ormqr": flops.ormqr,
    "qr": flops.qr,
    "schur": flops.schur,
    "svd": flops.svd,
    "symmetric_product": flops.symmetric_product,
    "tridiagonal": flops.tridiagonal,
}

for _name, _flops in _MATRIX.items():
    register_rule(_name, batched(2), flops=_flops)
register_rule("cholesky_update", batched(2))
register_rule("lu_pivots_to_permutation", batched(1))
register_rule("triangular_solve", triangular_solve, passes=(LINEAR(1),), flops=flops.triangular_solve)
register_rule("tridiagonal_solve", tridiagonal_solve, passes=(LINEAR(3),))

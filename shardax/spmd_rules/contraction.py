"""dot_general: batch dims and free dims are kept, contracting dims leave a pending sum; of booleans, a
maximum.
"""

from shardax.graph.graph import Node
from shardax.spmd_rules import flops
from shardax.spmd_rules.registry import LINEAR, register_rule


def dot_general(node: Node) -> str:
    """ "b m k+, b k+ n -> b m n", with as many of each as the dimension numbers say."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = node.params["dimension_numbers"]
    mark = ":max" if node.outputs[0].aval.dtype == bool else "+"
    lhs = [f"m{d}" for d in range(len(node.inputs[0].shape))]
    rhs = [f"n{d}" for d in range(len(node.inputs[1].shape))]
    for i, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        lhs[a] = rhs[b] = f"b{i}"
    for i, (a, b) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        lhs[a] = rhs[b] = f"k{i}{mark}"
    result = [f"b{i}" for i in range(len(lhs_batch))] + [
        f for side in (lhs, rhs) for f in side if f[0] in "mn"
    ]
    return f"{' '.join(lhs)}, {' '.join(rhs)} -> {' '.join(result)}"


def scaled_matmul(node: Node) -> str:
    """The contracted dim is unsplit: the scales of f8 have no zero with which its padding could be masked."""
    return "b m k!, b n k!, b m s!, b n s! -> b m n"


register_rule(
    "dot_general",
    dot_general,
    passes=(LINEAR(0), LINEAR(1)),
    flops=flops.dot_general,
    fuses="transposes",
)
register_rule("scaled_matmul", scaled_matmul, flops=flops.scaled_matmul)
register_rule("scaled_matmul_wrapper", scaled_matmul, flops=flops.scaled_matmul)

"""The FLOPs of the primitives that multiply, from parameters and the shapes of operands and results: a
device's, of its shards.

A multiplication and an addition are two FLOPs; complex numbers count as real ones. The counts of
factorizations are those of LAPACK Working Note 41 (appendix: Cholesky, LU, QR) and of Golub and Van Loan,
Matrix Computations, 4th edition (section 7.4 Hessenberg, 7.5 Schur, 8.3 symmetric eigenproblem, table 8.6.1
singular values); that of an FFT is FFTW's (fftw.org/speed). Other algorithms, as accelerators run them, do
several times as many.
"""

import math
from collections.abc import Callable

from shardax.spmd_rules.registry import Flops


def dot_general(params, in_shapes, out_shapes) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * math.prod(out_shapes[0]) * math.prod(in_shapes[0][d] for d in contracted)


def scaled_matmul(params, in_shapes, out_shapes) -> float:
    return 2 * math.prod(out_shapes[0]) * in_shapes[0][-1]


def ragged_dot_general(params, in_shapes, out_shapes) -> float:
    """Each row meets the matrix of its group alone. On a device that has some of the groups, their average
    share of the rows counts; where it has the sizes of no others, as in a local program, all rows do."""
    dims = params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = dims.dot_dimension_numbers
    lhs, rhs, sizes = in_shapes
    gone = (*contracted, *batch, *dims.rhs_group_dimensions)
    held = math.prod(rhs[d] for d in dims.rhs_group_dimensions)
    share = min(1, held / max(sizes[-1], 1)) if dims.rhs_group_dimensions else 1
    return 2 * share * math.prod(lhs) * math.prod(n for d, n in enumerate(rhs) if d not in gone)


def conv_general_dilated(params, in_shapes, out_shapes) -> float:
    """Each place of the result sees every input channel of its group at each place of the window. Where the
    operand is dilated, most places of the window see nothing. Padding counts: its share is small, but in tiny
    images."""
    kernel, channels = in_shapes[1], params["dimension_numbers"].rhs_spec[0]
    window = math.prod(n for d, n in enumerate(kernel) if d != channels)
    return 2 * math.prod(out_shapes[0]) * window / math.prod(params["lhs_dilation"])


def fft(params, in_shapes, out_shapes) -> float:
    """5 n log2 n for each transform of n complex numbers, half as many for real ones."""
    size = max(math.prod(in_shapes[0]), math.prod(out_shapes[0]))
    is_real = "RFFT" in getattr(params["fft_type"], "name", str(params["fft_type"]))
    return (2.5 if is_real else 5) * size * math.log2(max(math.prod(params["fft_lengths"]), 1))


# Linear algebra


def of_matrix(count: Callable[[int, int], float]) -> Flops:
    """Of a primitive that does `count(m, n)` for each matrix of its first operand."""
    return lambda params, in_shapes, out_shapes: math.prod(in_shapes[0][:-2]) * count(*in_shapes[0][-2:])


def steps(m: int, n: int, k: int) -> float:
    """The places that k steps of an elimination change of an m x n matrix, one row and column fewer each
    time.
    """
    return m * n * k - (m + n) * k**2 / 2 + k**3 / 3


cholesky = of_matrix(lambda m, n: n**3 / 3)
eigh = of_matrix(lambda m, n: 9 * n**3)
hessenberg = of_matrix(lambda m, n: 10 / 3 * n**3)
lu = of_matrix(lambda m, n: 2 * steps(m, n, min(m, n)))
reflections = of_matrix(lambda m, n: 4 * steps(m, n, min(m, n)))
symmetric_product = of_matrix(lambda m, n: m**2 * n)
tridiagonal = of_matrix(lambda m, n: 4 / 3 * n**3)


def eig(params, in_shapes, out_shapes) -> float:
    vectors = params["compute_left_eigenvectors"] or params["compute_right_eigenvectors"]
    return _unsymmetric(in_shapes, vectors)


def schur(params, in_shapes, out_shapes) -> float:
    return _unsymmetric(in_shapes, params["compute_schur_vectors"])


def _unsymmetric(in_shapes, vectors: bool) -> float:
    return math.prod(in_shapes[0]) * in_shapes[0][-1] * (25 if vectors else 10)


def householder_product(params, in_shapes, out_shapes) -> float:
    *batch, m, n = in_shapes[0]
    return 4 * math.prod(batch) * steps(m, n, in_shapes[1][-1])


def ormqr(params, in_shapes, out_shapes) -> float:
    """Each reflection changes all of the matrix that it is applied to, one row (from the left) or column less
    each time.
    """
    *batch, m, n = in_shapes[2]
    k = in_shapes[1][-1]
    return math.prod(batch) * (4 * m * n * k - 2 * (n if params["left"] else m) * k**2)


def qr(params, in_shapes, out_shapes) -> float:
    """The reflections, and then as many again for the columns of Q."""
    *batch, m, n = in_shapes[0]
    k = min(m, n)
    return 4 * math.prod(batch) * (steps(m, n, k) + steps(m, out_shapes[0][-1], k))


def svd(params, in_shapes, out_shapes) -> float:
    *batch, m, n = in_shapes[0]
    m, n = max(m, n), min(m, n)
    if not params["compute_uv"]:
        one = 4 * m * n**2 - 4 / 3 * n**3
    elif params["full_matrices"]:
        one = 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    else:
        one = 14 * m * n**2 + 8 * n**3
    return math.prod(batch) * one


def triangular_solve(params, in_shapes, out_shapes) -> float:
    return math.prod(out_shapes[0]) * in_shapes[0][-1]

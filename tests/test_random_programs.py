"""Random programs under random meshes and shardings, against the same function under plain `jax.jit`, on one
device.

A program is text, so that a failure prints what reproduces it. In CI a few dozen, always the same; by hand as
many as wanted:

    python -m tests.test_random_programs 2000 --jobs 2   as many programs, of seeds 0, 1, ...; failures are printed, reduced
    python -m tests.test_random_programs 1 --seed 17     that of one seed
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType

import shardax as sx
from shardax.reshard import run
from tests.programs import WAYS, Program, random_program


@pytest.mark.slow  # CI runs a hundred others, by `make fuzz`
@hypothesis.settings(max_examples=30, derandomize=True, deadline=None, database=None, print_blob=False)
@hypothesis.given(st.randoms(use_true_random=False))
def test_random_programs(rng):
    with poisoned_padding():
        check(random_program(rng))


@contextlib.contextmanager
def poisoned_padding():
    """Padding holds NaN or 77 here, so that whoever reads it is found out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run, "_garbage", lambda dtype: jnp.asarray(np.nan if _is_float(dtype) else 77).astype(dtype)
        )
        yield


# Run and compared


def check(program: Program) -> None:
    """Raises, with the program as a note, where shard_jit and the plain function differ."""
    try:
        wanted = _called(program, jax.jit, lambda x, spec: x)(*program.arguments())
        got = _called(program, _shard_jit(program), lax.with_sharding_constraint)(*program.arguments())
        if not _agree(got, wanted, program.scale):
            _compare(got, _one_by_one(program, wanted), program.scale)
    except Exception as error:
        error.add_note(str(program))
        raise


def _agree(got, wanted, scale: float) -> bool:
    try:
        _compare(got, wanted, scale)
    except AssertionError:
        return False
    return True


def _one_by_one(program: Program, compiled):
    """What decides where the compiled program and ours differ: XLA's CPU compiler fuses some of them wrongly,
    as a reversed slice that is written back before a convolution (`jax.jit` alone, on one device)."""
    with jax.disable_jit():
        wanted = _called(program, jax.jit, lambda x, spec: x)(*program.arguments())
    if not _agree(compiled, wanted, program.scale):
        print(f"# jax.jit itself differs from the same operations one by one:\n{program}\n")
    return wanted


def _called(program: Program, jit: Callable[..., Any], constrain: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a program, compiled by `jit`, differentiated inside or outside of it, and called in its
    way.
    """
    f = program.function(constrain)
    if not program.grad:
        return WAYS[program.way](jit(f))
    if program.way == "grad":
        return _with_gradients(jit(f), program.args)
    return WAYS[program.way](jit(_with_gradients(f, program.args)))


def _shard_jit(program: Program) -> Callable[..., Any]:
    axes = tuple("xyz"[: len(program.mesh)])
    devices = jax.devices()[: math.prod(program.mesh)]
    mesh = jax.make_mesh(program.mesh, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)
    outs = program.out_shardings if not program.grad or program.way == "grad" else None
    donated = program.donated if program.way == "call" else ()
    options = sx.Options(chip=program.chip)
    return sx.shard_jit(
        mesh=mesh,
        in_shardings=program.in_shardings,
        out_shardings=outs,
        donate_argnums=donated,
        options=options,
    )


def _compare(got, wanted, scale: float) -> None:
    """Floats to within what the order of sums changes, in relation to the greatest numbers at hand; all else
    exactly.
    """
    got, wanted = ([_plain(x) for x in jax.tree.leaves(tree)] for tree in (got, wanted))
    floats = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in wanted if x.dtype == np.float64]
    for have, want in zip(got, wanted, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        if want.dtype == np.float64:
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=scale * max(1.0, *floats))
        else:
            np.testing.assert_array_equal(have, want)


def _plain(x) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64) if _is_float(x) else np.asarray(x)


def _with_gradients(f: Callable[..., Any], args) -> Callable[..., Any]:
    """The gradients of a weighted sum of all float results, and the results."""
    moving = tuple(i for i, (_, _, dtype) in enumerate(args) if dtype in ("float32", "bfloat16"))

    def loss(*args):
        results = f(*args)
        return sum(
            (_weights(x.shape) * x.astype("float32")).sum() for x in results if _is_float(x)
        ) + jnp.float32(0), results

    return jax.grad(loss, moving, has_aux=True)


def _weights(shape: tuple[int, ...]):
    return np.cos(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


# By hand


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the programs, run none")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.count)
    if given.show:
        print(*(f"# seed {seed}\n{random_program(random.Random(seed))}\n" for seed in seeds), sep="\n")
        return 0
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), _start) as pool:
        found = pool.map(_failure, seeds)
        failed = [seed for seed, words in zip(seeds, found, strict=True) if words and not print(words)]
    print(
        f"{given.count} programs of seeds from {given.seed}, JAX {jax.__version__}, failed: "
        f"{failed or 'none'}"
    )
    return bool(failed)


def _start() -> None:
    """Of a worker: eight devices, and compilation that takes half the time."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("error")


def _failure(seed: int) -> str:
    """The reduced program of a seed that fails, with the error; "" if it does not."""
    program = random_program(random.Random(seed))
    error = _error(program)
    if error is None:
        return ""
    program = _reduced(program, type(error))
    return f"# seed {seed}: {type(error).__name__}: {str(_error(program))[:600]}\n{program}\n"


def _error(program: Program) -> Exception | None:
    try:
        with warnings.catch_warnings(), poisoned_padding(), jax.numpy_dtype_promotion("strict"):
            warnings.filterwarnings("ignore", "Some donated buffers")
            check(program)
    except Exception as error:
        return error


def _reduced(program: Program, kind: type) -> Program:
    """The program without whatever it fails without, in the same way."""
    again = True
    while again:
        again = False
        for simpler in _simpler(program):
            error = _error(simpler)
            if type(error) is kind and not isinstance(error, NameError):
                program, again = simpler, True
                break
    return program


def _simpler(program: Program):
    for i in range(len(program.results) if len(program.results) > 1 else 0):
        yield replace(
            program, results=_less(program.results, i), out_shardings=_less(program.out_shardings, i)
        )
    for i in reversed(range(len(program.statements))):
        yield replace(program, statements=_less(program.statements, i))
    for i, (name, _, _) in enumerate(program.args):
        if all(name not in text for text in (*program.statements, *program.results)) and not program.donated:
            yield replace(program, args=_less(program.args, i), in_shardings=_less(program.in_shardings, i))
    for name in ("grad", "donated"):
        if getattr(program, name):
            yield replace(program, **{name: type(getattr(program, name))()})
    for name in ("in_shardings", "out_shardings"):
        specs = getattr(program, name)
        for i in [i for i, spec in enumerate(specs) if spec is not None]:
            yield replace(program, **{name: (*specs[:i], None, *specs[i + 1 :])})


def _less(items: tuple, i: int) -> tuple:
    return items[:i] + items[i + 1 :]


if __name__ == "__main__":
    sys.exit(main())

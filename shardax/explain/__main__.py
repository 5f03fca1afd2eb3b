"""python -m shardax.explain models.gpt2 --mesh data=16,model=128: the plan of a program, without devices.

The program is a function of a module, here `models.gpt2:program`. It is called `program` unless another name
is given. It takes the mesh, an AbstractMesh, and returns a function that `shard_jit` made, and the tuple of
arguments to plan it for (arrays or `jax.ShapeDtypeStruct`s):

    def program(mesh, batch=64):
        step = shardax.shard_jit(train_step, mesh=mesh, in_shardings=...)
        return step, (state_shapes, batch_shape)

Its further parameters are set by options: `--set batch=256`.
"""

import argparse
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType

from shardax.cost.chips import CHIPS
from shardax.ledger.words import seconds_text


def main(argv: Sequence[str] | None = None) -> int:
    start = time.perf_counter()
    options = _parser().parse_args(argv)
    mesh = parse_mesh(options.mesh)
    plan = plan_of(options.program, mesh, dict(map(_setting, options.set)))
    _print(plan, options, mesh)
    _write(plan, options)
    wall, processor = time.perf_counter() - start, time.process_time()
    print(
        f"\nIn all {seconds_text(wall)} by the clock; {seconds_text(processor)} of processor time, JAX's "
        "import included."
    )
    return 0


def plan_of(name: str, mesh: AbstractMesh, settings: dict[str, Any]):
    """The plan of the program of this name ("package.module" or "package.module:function")."""
    fun, args = _called(_function(name), name, mesh, settings)
    try:
        return fun.plan(*args)
    except ValueError as error:
        fail(f"{name} cannot be planned on the mesh {_text(mesh)}: {error}")


def parse_mesh(text: str) -> AbstractMesh:
    """
    >>> parse_mesh("data=16,model=128").shape
    OrderedDict({'data': 16, 'model': 128})
    """
    shape: dict[str, int] = {}
    for word in text.split(","):
        axis, _, size = (part.strip() for part in word.partition("="))
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1:
            fail(f"--mesh {text}: '{word}' is not of the form axis=size, as in --mesh data=16,model=128")
        if axis in shape:
            fail(f"--mesh {text}: axis {axis} is named twice")
        shape[axis] = int(size)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def fail(message: str) -> NoReturn:
    raise SystemExit(f"shardax.explain: {message}")


def _function(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    module = _module(module_name)
    function = getattr(module, function_name or "program", None)
    if not callable(function):
        fail(
            f"{module_name} ({module.__file__}) has no function {function_name or 'program'!r}: write one "
            "that takes a mesh and returns (shard_jit(f, mesh=mesh, ...), arguments), or name another, as "
            "in models.gpt2:program"
        )
    return function


def _module(name: str):
    if name.endswith(".py") or "/" in name:
        module = os.path.relpath(name).removesuffix(".py").replace("/", ".")
        fail(f"{name!r} is a file: give the module as Python imports it, such as {module}")
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            fail(f"{name} imports {error.name}, which is not installed")
        fail(
            f"no module {error.name!r} in {os.getcwd()} or on Python's path: give one as it is imported, "
            "such as models.gpt2"
        )


def _called(
    function: Callable[..., Any], name: str, mesh: AbstractMesh, settings: dict[str, Any]
) -> tuple[Any, tuple]:
    try:
        inspect.signature(function).bind(mesh, **settings)
    except TypeError as error:
        fail(
            f"{name} takes {inspect.signature(function)}, and is given the mesh and "
            f"{settings or 'no settings'}: {error}"
        )
    try:
        result = function(mesh, **settings)
    except ValueError as error:
        fail(f"{name} on the mesh {_text(mesh)}: {error}")
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not hasattr(result[0], "plan")
        or not isinstance(result[1], tuple)
    ):
        fail(
            f"{name} returned {_short(result)}: it must return (what shard_jit made, the tuple of its "
            "arguments)"
        )
    return result


def _print(plan, options, mesh: AbstractMesh) -> None:
    if options.against:
        print(
            f"{options.program} on {options.against} (+) against {_text(mesh)} "
            f"(-):\n{_difference(plan, options)}"
        )
        return
    for what in options.why:
        try:
            print(plan.why(what))
        except ValueError as error:
            fail(str(error))
    for chip in options.chip:
        print(plan.estimate(chip))
    if options.source:
        print(plan.source())
    if not (options.why or options.chip or options.source):
        print(plan)


def _difference(plan, options) -> str:
    """From a plan on another mesh, or one in a file."""
    on_mesh = "=" in options.against
    other = (
        plan_of(options.program, parse_mesh(options.against), dict(map(_setting, options.set)))
        if on_mesh
        else options.against
    )
    try:
        return plan.diff(other) or "no difference"
    except ValueError as error:
        fail(str(error))


def _write(plan, options) -> None:
    for path, write in (
        (options.html, plan.to_html),
        (options.json, lambda path: Path(path).write_text(plan.to_json())),
    ):
        if path:
            try:
                write(path)
            except OSError as error:
                fail(f"{path} cannot be written: {error.strerror}")
            print(f"\nWritten: {path}")


def _setting(text: str) -> tuple[str, Any]:
    """
    >>> _setting("batch=64"), _setting("size=tiny"), _setting("remat=false")
    (('batch', 64), ('size', 'tiny'), ('remat', False))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        fail(f"--set {text}: not of the form name=value")
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def _text(mesh: AbstractMesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else text[:59] + "…"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m shardax.explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("program", help="module, or module:function, such as models.gpt2")
    add("--mesh", required=True, metavar="data=16,model=128", help="axes and sizes; no devices are needed")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the function, may be repeated",
    )
    add(
        "--why",
        action="append",
        default=[],
        metavar="WHAT",
        help="only why an argument, a line or a variable is split so",
    )
    add("--chip", action="append", default=[], choices=list(CHIPS), help="only the estimate for this chip")
    add("--source", action="store_true", help="only the local program as Python")
    add(
        "--against",
        metavar="MESH|FILE",
        help="only what differs on another mesh, or in a plan that --json wrote",
    )
    add("--html", metavar="FILE", help="write the plan as a page for a browser")
    add("--json", metavar="FILE", help="write the plan as JSON")
    return parser


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())

"""Plan: what shardax made of a function, for people to read and for tests to assert on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardax import _jax
from shardax.explain.analysis import Analysis
from shardax.explain.html import html_text
from shardax.explain.json import json_text
from shardax.explain.record import changes, check_same_program, read, record
from shardax.explain.source import source
from shardax.explain.tables import WIDTH, plain
from shardax.explain.terminal import shown
from shardax.explain.text import summary, tables
from shardax.explain.values import shardings_text
from shardax.explain.why import why
from shardax.validation import is_integer, require


@dataclass(frozen=True, eq=False)
class Plan(Analysis):
    """What runs on each device, what it sends and why. `print(plan)` shows all of it.

    Its fields are those of `shardax.explain.facts.Facts`: `mesh`, `global_jaxpr`, `local_jaxpr`,
    `in_shardings`, `out_shardings`, `collectives` and more.
    """

    def shardings(self) -> str:
        """A table of what each line of the user's code makes, and of its sharding."""
        return shardings_text(self)

    @_jax.boundary
    def why(self, what: str) -> str:
        """The chain of facts that led to a sharding, in words.

        Args:
          what: the path of an argument ("state/params/w" or "0/params/w"), a line ("model.py:12"), or the
            name of a variable that a line of the program assigns, or of a `checkpoint_name`.

        Raises ValueError where nothing is called so.
        """
        expected = (
            "the path of an argument ('state/params/w'), a line ('model.py:12'), or the name of a variable"
        )
        require(isinstance(what, str), "what of Plan.why", what, expected)
        return why(self, what)

    @_jax.boundary
    def diff(self, other: "Plan | str | os.PathLike") -> str:
        """The differences in what this plan and `other` send, and in how arguments and results rest; "" where
        there are none.

        Lines with - are in this plan alone, those with + in the other. Lines of the user's code count by
        their file only.

        Args:
          other: a plan, or the file of one that `to_json` or `shardax.testing.assert_plan` wrote.

        Raises ValueError where the file is no plan, or one of another program or other arguments.
        """
        require(
            isinstance(other, Plan | str | os.PathLike),
            "other of Plan.diff",
            other,
            "a plan, or the path of the file of one",
        )
        now = record(self)
        if isinstance(other, Plan):
            return "\n".join(changes(now, record(other)))
        other = Path(other)
        other_record = read(other)
        check_same_program(
            other_record, now, str(other), "Compare plans of one program, or give the plan itself"
        )
        return "\n".join(changes(now, other_record))

    def to_json(self) -> str:
        """All that the plan says, for other programs to read."""
        return json_text(self)

    @_jax.boundary
    def to_html(self, path: str | os.PathLike) -> None:
        """Writes one HTML file that needs no network: the program, what each line costs, sortable ledgers."""
        require(
            isinstance(path, str | os.PathLike),
            "path of Plan.to_html",
            path,
            "the path of a file, such as 'plan.html'",
        )
        Path(path).write_text(html_text(self), encoding="utf-8")

    def source(self) -> str:
        """The local program as Python. Executed with `source_objects`, it defines a function `program` of the
        mesh.

        `program(mesh)` is a function that takes the leaves of the arguments, and returns those of the
        results.

        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> plan = sx.shard_jit(lambda v: 2 * v, mesh=mesh, in_shardings=jax.P("x")).plan(jax.numpy.ones(4))
        >>> namespace = plan.source_objects()
        >>> exec(plan.source(), namespace)
        >>> namespace["program"](mesh)(jax.numpy.ones(4))
        (Array([2., 2., 2., 2.], dtype=float32),)
        """
        return source(self).text

    def source_objects(self) -> dict[str, Any]:
        """The names with which to execute `source`: what its text uses but does not make, above all large
        constants.
        """
        return source(self).objects

    @_jax.boundary
    def text(self, width: int = WIDTH) -> str:
        """What `print` shows, as plain text of at most `width` columns: reasons are as wide as that, tables
        only where their rows need it. (On a terminal, `print` takes its width, and colors.)
        """
        require(is_integer(width, 1), "width of Plan.text", width, "a number of columns, such as 120")
        return plain(tables(self), width)

    @_jax.boundary
    def summary(self, lines: int = 10) -> str:
        """The plan in brief: bytes sent and memory on each device, bytes by kind of collective, and by line.

        Args:
          lines: how many lines of the user's code are listed, those that send most.

        Raises ValueError where `lines` is no positive integer.

        >>> import jax, shardax as sx
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> f = sx.shard_jit(lambda x: x.sum(), mesh=AbstractMesh((4,), ("x",)), in_shardings=P("x"))
        >>> print(f.plan(jax.ShapeDtypeStruct((8,), "float32")).summary())
        4 devices, mesh x=4. Each sends 6 B per call, in 1 collectives.
        ...
        """
        require(is_integer(lines, 1), "lines of Plan.summary", lines, "a number of lines, such as 10")
        return shown(summary(self, lines))

    def __str__(self):
        return shown(tables(self))

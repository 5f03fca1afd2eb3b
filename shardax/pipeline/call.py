"""A call of a pipelined function: its arguments, the program of one microbatch, and running it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardax import _jax
from shardax.annotations.annotate import describe
from shardax.annotations.explicit import shape_of
from shardax.graph.evaluate import evaluate, is_call
from shardax.jit.signature import argument_name
from shardax.options import current
from shardax.pipeline.batch import check_one_batch, of_batch
from shardax.pipeline.cut import check_marks, flat
from shardax.pipeline.flipped import unflipped
from shardax.pipeline.others import Others, by_place
from shardax.pipeline.packed import Packing
from shardax.pipeline.packer import packing_of
from shardax.pipeline.plain_sums import plain_sum
from shardax.pipeline.printed import without_callbacks
from shardax.pipeline.region import Made, Region
from shardax.pipeline.repacking import unpacked
from shardax.pipeline.resting import Weights
from shardax.pipeline.split import Split
from shardax.pipeline.table import Schedule
from shardax.pipeline.virtual import AXIS, STACKED, Microbatch, microbatch
from shardax.transforms import Argument, Context, annotations_of

Asked = tuple[Any, int | None, float | None]  # schedule, chunks, memory


@dataclass(frozen=True)
class Call:
    """One call: the parameters, and the arrays of the other arguments, of which `is_batch` are the batch.
    `count`: of the arguments by place, which those of names `keywords` follow.
    """

    function: Callable[..., Any]
    weights: Weights
    taken: Others
    others: list[Any]
    is_batch: list[bool]
    names: list[str]
    numbers: tuple[int, ...]
    count: int
    keywords: tuple[str, ...]
    axis: str
    stages: int
    microbatches: int
    at: tuple[str, ...] = ()

    @staticmethod
    def of(
        function,
        args,
        kwargs,
        numbers: tuple[int, ...],
        batch_argnames,
        axis: str,
        microbatches: int,
        at: tuple[str, ...] = (),
    ) -> "Call":
        name = getattr(function, "__name__", "the loss")
        args, keywords = by_place(function, args, kwargs)
        for n in numbers:
            if not 0 <= n < len(args):
                raise ValueError(f"argnums has {n}, and {name} is called with {len(args)} arguments")
        stages = _stages(axis, name)
        weights = Weights.of([args[n] for n in numbers], stages, axis)
        placed = {argument_name(function, n): x for n, x in enumerate(args) if n not in numbers}
        _check_apart(batch_argnames, [argument_name(function, n) for n in numbers], name)
        taken, others = Others.of(placed | keywords)
        names = list(taken.names)
        if batch_argnames is None:
            check_one_batch(names, others, name, microbatches)
        is_batch = of_batch(names, others, [True] * len(others), batch_argnames, name, microbatches)
        call = Call(
            function,
            weights,
            taken,
            others,
            is_batch,
            names,
            numbers,
            len(args),
            tuple(keywords),
            axis,
            stages,
            microbatches,
            at,
        )
        if not any(is_batch):
            raise ValueError(
                f"{name} is called with no array that has rows of a batch, besides the parameters (argument"
                f"{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}, as argnums says); give it a "
                "batch, which is cut into microbatches, in an argument of its own"
            )
        if call.rows < microbatches:
            raise ValueError(
                f"{name} is called with a batch of {call.rows} rows (the first dim of the first array that "
                f"is no parameter, or of batch_argnames), and there are {microbatches} microbatches; take as "
                "many microbatches as rows at most"
            )
        return call

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "the loss")

    @property
    def rows(self) -> int:
        """Of the batch."""
        return next((x.shape[0] for x, b in zip(self.others, self.is_batch, strict=True) if b), 0)

    @property
    def is_even(self) -> bool:
        return self.rows % self.microbatches == 0

    def restored(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments of the function, of the leaves of parameters, not packed, and of others."""
        count = len(self.weights.types)
        own = iter(jax.tree.unflatten(self.weights.plain_tree, leaves[:count]))
        others = iter(self.taken.restored(leaves[count:]))
        return [next(own if n in self.numbers else others) for n in range(self.count)] + list(others)

    def called(self, leaves: Sequence[Any]) -> Any:
        """What the function returns."""
        args = self.restored(leaves)
        return self.function(*args[: self.count], **dict(zip(self.keywords, args[self.count :], strict=True)))

    # The program of one microbatch

    def unpacked(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of parameters as the function takes them, and of others, of those at rest."""
        count = len(self.weights.arrays)
        return [*self.weights.plain(leaves[:count], unpacked), *leaves[count:]]

    def of_gradients(self, reduce: str, has_aux: bool) -> tuple[Split, Any]:
        """The sums of the loss and of the gradients, and the structure of the other results."""
        structure: list[Any] = []
        moving = [is_inexact(x) for x in self.weights.types]
        if not any(moving):
            raise ValueError(
                f"sx.pipeline.value_and_grad differentiates {self.name} by argument"
                f"{'s' * (len(self.numbers) != 1)} {', '.join(map(str, self.numbers))}, in which there is no "
                "array of floats; give the parameters there, or name their arguments by argnums=; without "
                "gradients, take sx.pipeline.apply"
            )
        scale = 1 / self.microbatches if reduce == "mean" and self.is_even else 1.0
        summed = partial(lax.psum, axis_name=AXIS) if self.is_even else (lambda x: x)

        def loss(*leaves):
            value, aux = self.checked_loss(self.called(leaves), has_aux)
            rows, tree = jax.tree.flatten(aux)
            structure.append(tree)
            return [jnp.asarray(x) for x in (value, *rows)]

        def run(*leaves):
            leaves = self.unpacked(leaves)
            closed = jax.make_jaxpr(loss)(*(shape_of(jax.typeof(x)) for x in leaves))
            program = flat(closed, is_call)
            check_marks(program)  # in the gradient's program loops are other ones
            if reduce == "mean" and self.is_even:
                self.check_mean(program)

            def of_moved(moved):
                own = iter(moved)
                params = [next(own) if m else x for x, m in zip(leaves, moving, strict=False)]
                value, *rows = evaluate(closed, [*params, *leaves[len(params) :]])
                return value * scale, rows

            moved = [x for x, m in zip(leaves, moving, strict=False) if m]
            (value, rows), found = jax.value_and_grad(of_moved, has_aux=True)(moved)
            own = iter(map(summed, found))
            gradients = [next(own) if m else jnp.zeros_like(x) for x, m in zip(leaves, moving, strict=False)]
            return [summed(value), *self.weights.at_rest(gradients), *rows]

        return self.split(run, 1 + len(self.weights.arrays), STACKED), structure

    def check_mean(self, program) -> None:
        """That the loss of a microbatch is no plain sum, as far as its program shows it."""
        is_batch = [False] * len(self.weights.types) + self.is_batch
        eqn = plain_sum(program.jaxpr, is_batch) if self.microbatches > 1 else None
        if eqn is not None:
            line = _jax.user_line(eqn.source_info) or "an unknown line"
            raise ValueError(
                f"{self.name} is a sum over the rows of its microbatch, taken at {line}, and reduce is "
                f"'mean': the mean of {self.microbatches} microbatches would be 1/{self.microbatches} of the "
                "sum over the batch; give reduce='sum', or take the mean in the loss"
            )

    def checked_loss(self, result: Any, has_aux: bool) -> tuple[Any, Any]:
        """The loss and the other results, of which there are none without `has_aux`."""
        is_pair = isinstance(result, tuple | list) and len(result) == 2
        value, aux = result if has_aux and is_pair else (result, ())
        if has_aux > is_pair or not _is_scalar(value):
            way = "; if these are the loss and others, give has_aux=True" * (is_pair and not has_aux)
            raise ValueError(
                f"{self.name} returns {_types_text(result)}; expected a scalar of floats, a mean "
                "or sum over its microbatch" + ", and with has_aux a pair of it and others" * has_aux + way
            )
        if has_aux and not self.is_even:
            raise ValueError(
                f"{self.name} is called with a batch of {self.rows} rows, which {self.microbatches} "
                "microbatches do not divide, and has_aux: there is no row of the other results for each "
                "microbatch then; take a number of microbatches that divides the batch, or leave has_aux out"
            )
        return value, aux

    def of_results(self) -> tuple[Split, Any]:
        """Rows of results, and their structure."""
        structure: list[Any] = []
        count = self.rows // self.microbatches
        if not self.is_even:
            raise ValueError(
                f"{self.name} is called with a batch of {self.rows} rows, which {self.microbatches} "
                "microbatches do not divide; take a number of microbatches that does, or pad the batch"
            )

        def run(*leaves):
            found, tree = jax.tree.flatten(self.called(self.unpacked(leaves)))
            structure.append(tree)
            for x in map(jax.typeof, found):
                if not x.shape or x.shape[0] != count:
                    raise ValueError(
                        f"{self.name} returns {x.str_short()} for a microbatch of {count} rows; expected "
                        "arrays whose first dim is that of the batch; give back one number for each row"
                    )
            return [jnp.asarray(x) for x in found]

        return self.split(run, 0, 0), structure

    def split(self, function: Callable[..., list[Any]], sums: int, dim: int) -> Split:
        """Of a function of leaves, whose first results are sums; the others have rows along `dim`."""
        params = [shape_of(jax.typeof(x)) for x in self.weights.arrays]
        others = [shape_of(jax.typeof(x)) for x in self.others]
        is_param = [True] * len(params) + [False] * len(others)
        is_batch = [False] * len(params) + self.is_batch
        if self.is_even:
            rows = self.rows // self.microbatches
            own = [
                jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if b else x
                for x, b in zip(others, self.is_batch, strict=True)
            ]
            number = jax.ShapeDtypeStruct((), "int32")
            with _jax.axes_in_scope({AXIS: self.microbatches}), self._noting_rows(rows):
                closed = jax.make_jaxpr(lambda *args: function(*args[:-1]))(*params, *own, number)
                self.check_annotations(closed)
                count = len(closed.out_avals)
                closed, called = without_callbacks(flat(closed))
                closed = unflipped(closed)
            read = len(closed.out_avals) - count
            results = (None,) * sums + (dim,) * (count - sums) + (STACKED,) * read
            program = Microbatch(closed, tuple(is_batch), results)
        else:
            closed = jax.make_jaxpr(function)(*params, *others)
            self.check_annotations(closed)
            closed, called = without_callbacks(closed)
            names = ["params"] * len(params) + self.names
            pairs = zip(names, (*params, *others), is_param, strict=True)
            arguments = tuple(Argument(name, x, is_state=is_state) for name, x, is_state in pairs)
            context = Context(_jax.context_mesh(), arguments, (), current())
            program = microbatch(closed, context, is_batch, self.microbatches)
        named = [n for n, b in zip(self.names, self.is_batch, strict=True) if b]
        way = f"take a number of microbatches that divides the {self.rows} rows of the batch"
        who = f"pipeline of {self.name}"
        return Split(
            program, is_param, is_batch, named, self.name, not sums, who, way, self.at, called=called
        )

    @contextmanager
    def _noting_rows(self, rows: int) -> Iterator[None]:
        """What the function itself raises tells which shapes it was called with."""
        try:
            yield
        except Exception as error:
            cut = dict.fromkeys(n for n, b in zip(self.names, self.is_batch, strict=True) if b)
            error.add_note(
                f"{self.name} is called here with one of {self.microbatches} microbatches: {rows} rows of "
                f"{', '.join(cut) or 'nothing'}, and all else whole; batch_argnames= says what is cut"
            )
            raise

    def check_annotations(self, closed) -> None:
        """Raises ValueError where an annotation in the function names the axis of stages."""
        for eqn, annotation in annotations_of(closed):
            if self.axis in (a for axes in annotation.dims for a in axes or ()):
                line = _jax.user_line(eqn.source_info) or "an unknown line"
                raise ValueError(
                    f"{annotation.source} at {line} splits a dim over {self.axis!r}, along which the "
                    "pipeline's stages lie; name another axis there, or leave it out"
                )

    # Running it

    def results(self, asked: Asked) -> Any:
        split, structure = self.of_results()
        return jax.tree.unflatten(structure[-1], self.run(split, asked))

    def gradients(self, asked: Asked, reduce: str, has_aux: bool) -> tuple[Any, Any, Any]:
        split, structure = self.of_gradients(reduce, has_aux)
        arrays = self.weights.arrays
        value, *found = self.run(split, asked)
        gradients = [
            g if is_inexact(x) else np.zeros(np.shape(x), jax.dtypes.float0)
            for g, x in zip(found, arrays, strict=False)
        ]
        rows = jax.tree.unflatten(structure[-1], found[len(arrays) :])
        return value, rows, jax.tree.unflatten(self.weights.tree, gradients)

    def run(self, split: Split, asked: Asked) -> list[Any]:
        """The results of all microbatches."""

        def pipelined(region: Region, arguments, batch, rest, accumulators) -> Made:
            schedule, told = self.schedule(region, asked)
            weights = Weights.of(arguments, self.stages, self.axis)
            how = {"asked": accumulators, "told": told, "dim": split.program.batch_dim}
            return region.run(schedule, weights, batch, rest, self.axis, **how)

        def cut(number: int, x: Array) -> Array:
            return _microbatches(x, self.microbatches)

        return split.run([*self.weights.arrays, *self.others], self.microbatches, cut, pipelined)

    def schedule(self, region: Region, asked: Asked) -> tuple[Schedule, str]:
        schedule, chunks, memory = asked
        return region.schedule(schedule, self.stages, self.microbatches, chunks, self.axis, memory)

    def packing(self, split: Split, asked: Asked, said: tuple[Any, Any]) -> Packing:
        """How the parameters may rest; `said`: specs and labels."""
        if len(self.numbers) > 1:
            raise ValueError(
                f"argnums is {self.numbers}; expected one argument that has all parameters to pack: put "
                "them in one tuple or dict"
            )
        region = split.loop
        schedule, _ = self.schedule(region, asked)
        rest = [shape_of(v.aval) for v in region.flow.rest[:-1]]
        (params,) = jax.tree.unflatten(self.weights.plain_tree, self.weights.types)
        return packing_of(region.cut(schedule), schedule, params, rest, self.axis, *said)


def _check_apart(batch_argnames: Any, of_params: Sequence[str], name: str) -> None:
    given = (batch_argnames,) if isinstance(batch_argnames, str) else batch_argnames or ()
    if both := [argument for argument in given if argument in of_params]:
        raise ValueError(
            f"batch_argnames of {name} has {both[0]!r}, which argnums says is differentiated; expected one "
            "or the other: what is differentiated goes to each microbatch whole; give the rows of a batch of "
            "which gradients are wanted to sx.pipeline.Pipeline, in a step with jax.value_and_grad"
        )


def is_inexact(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_scalar(x: Any) -> bool:
    """Whether it is one, of floats, and no tree of one."""
    try:
        type = jax.typeof(x)
    except TypeError:
        return False
    return type.shape == () and is_inexact(type)


def _types_text(tree: Any) -> str:
    """(float32[], float32[3])"""

    def text(x: Any) -> str:
        try:
            return jax.typeof(x).str_short()
        except TypeError:
            return type(x).__name__

    return str(jax.tree.map(text, tree)).replace("'", "")


def _stages(axis: str, name: str) -> int:
    mesh = _jax.context_mesh()
    if mesh is None or axis not in mesh.shape:
        where = (
            f"the mesh ({describe(mesh)}) has no axis {axis!r}"
            if mesh is not None
            else "no mesh is in context"
        )
        raise ValueError(
            f"pipeline of {name} over axis {axis!r}: {where}; call it in a function of shardax.shard_jit "
            "on a mesh that has the axis, or under jax.set_mesh"
        )
    return mesh.shape[axis]


def _microbatches(x: Array, count: int) -> Array:
    """[batch, ...] -> [rows, microbatches, ...], of rows that lie `count` apart: where the batch is split
    over devices, each device has its part of every microbatch."""
    return x.reshape(x.shape[0] // count, count, *x.shape[1:])

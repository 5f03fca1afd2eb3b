"""A train step that is written for one device, and what an example does when it is run: trains on 8, one
beside them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh, mesh_text

MESH = {"data": 2, "model": 4}


class Example(Protocol):
    """A module or a `TrainStep`. Without a mesh it trains on one device, under plain `jax.jit`."""

    def train(self, mesh, steps: int) -> list[float]:
        """The losses."""
        ...

    def plan(self, mesh) -> Any:
        """The plan of the train step."""
        ...


@dataclass(frozen=True)
class TrainStep:
    """`init(key)` makes a state, `step(state, batch)` the next and a loss; `specs` of the state's shapes is
    how it lies.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: Callable[[int], Iterator[Any]]
    specs: Callable[[Any], Any] = lambda shapes: None

    def on(self, mesh) -> Any:
        """The decorated step: nothing else depends on the mesh."""
        if mesh is None:
            return jax.jit(self.step)
        return sx.shard_jit(
            self.step, mesh=mesh, in_shardings=(self.specs(self.shapes()), P("data")), donate_argnums=0
        )

    def train(self, mesh, steps: int = 20) -> list[float]:
        step, state, losses = self.on(mesh), jax.jit(self.init)(jax.random.key(0)), []
        for batch in self.batches(steps):
            state, loss = step(state, batch)
            losses.append(float(loss))
        return losses

    def plan(self, mesh):
        return self.on(mesh).plan(self.shapes(), next(self.batches(1)))

    def shapes(self):
        return jax.eval_shape(self.init, jax.random.key(0))


def main(train: Callable[..., list[float]], steps: int = 20) -> None:
    mesh = make_mesh(MESH)
    sharded, plain = train(mesh, steps), train(None, steps)
    print(f"step   {mesh_text(MESH)}   one device")
    for step, pair in enumerate(zip(sharded, plain, strict=True)):
        print(f"{step:4}   {pair[0]:14.6f}   {pair[1]:10.6f}")

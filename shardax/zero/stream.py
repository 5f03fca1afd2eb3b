"""Stream: a function whose weights stay at the host or on disk, and come to the device ahead of their use.

The function is traced and cut into pieces (ZeRO-Inference). A loop over layers, a `scan` over stacked
weights, is a piece for each layer, all of one compiled program; a list of layers is cut where other weights
are read.

    time ->     load w0  load w1  load w2  load w3 ...      as many ahead as the budget of bytes allows
                         run w0   run w1   run w2 ...       what is run is dropped
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.validation import require
from shardax.zero.pieces import Cut, Loaded, Piece, cut

MIB = 2**20
LOADERS = 4  # threads: to an H100 one brings 6 GB/s from NumPy's memory, four bring 17


def stream(apply: Callable[..., Any], params: Any, ahead: int = 256 * MIB, keep: int = 0) -> "Streamed":
    """`apply(params, *args)` as a function of `*args`, for weights that do not fit into the device's memory.

    The results are those of `jax.jit(apply)`, up to rounding where XLA fuses across layers. On the device are
    at most `keep + ahead` bytes of weights, or one piece where that is larger: see `Streamed.largest`.
    It runs on one device, JAX's default.

    Args:
      apply: any function of arrays. Loops over layers are streamed layer by layer where they scan over the
        weights as they are given: casts belong inside.
      params: a pytree of NumPy arrays. They may be mapped into memory from files (`numpy.memmap`), as those
        of `open_safetensors` are: then they are read from disk as they are needed, each time.
      ahead: bytes that are loaded and not yet used, or in use.
      keep: bytes of weights, those that are used first, that stay on the device between calls: 0 is full
        offload.

    Raises ValueError where `params` has no arrays, or arrays of JAX's, and for negative budgets.

    >>> import shardax as sx
    >>> weights = {"w": np.full((3, 4, 4), 0.5, np.float32)}
    >>> def apply(params, x):
    ...     return jax.lax.scan(lambda h, w: (h @ w, None), x, params["w"])[0]
    >>> run = sx.zero.stream(apply, weights, ahead=128)
    >>> run(jax.numpy.ones((2, 4))).tolist()[0], run.largest
    ([8.0, 8.0, 8.0, 8.0], 64)
    """
    leaves = jax.tree.leaves(params)
    require(callable(apply), "apply of stream", apply, "a function of params and more")
    known = bool(leaves) and all(isinstance(x, np.ndarray) for x in leaves)
    found = leaves and next((x for x in leaves if not isinstance(x, np.ndarray)), leaves[0])
    require(known, "params of stream", found, "a pytree of NumPy arrays (jax.device_get)")
    for name, size in (("ahead", ahead), ("keep", keep)):
        require(isinstance(size, int) and size >= 0, f"{name} of stream", size, "a number of bytes")
    return Streamed(apply, params, ahead, keep)


@dataclass
class Streamed:
    """What `stream` returns: a function of the arguments after the weights."""

    apply: Callable[..., Any]
    params: Any = field(repr=False)
    ahead: int
    keep: int
    largest: int = 0
    """Bytes of weights that the dearest piece of the last call needs at once."""

    loaded: int = 0
    """Bytes of weights that the last call brought to the device."""

    most: int = 0
    """Bytes of weights that were on the device at once in the last call, kept ones included."""

    kept: dict[Loaded, Future] = field(default_factory=dict, repr=False)
    _cuts: dict[Any, Cut] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any) -> Any:
        args = jax.tree.map(jnp.asarray, args)
        todo, results, tree = self._cut(args)
        env: dict[Any, Any] = dict(enumerate(jax.tree.leaves(args)))
        with ThreadPoolExecutor(LOADERS) as pool:
            loader = _Loader(self, deque(todo), pool)
            for piece in todo:
                weights = loader.weights()
                made = piece.run(*weights, *(env[key] for key in piece.reads))
                loader.runs(made)
                env.update(zip(piece.makes, made, strict=True))
                for key in piece.last:
                    del env[key]
        self.loaded, self.most = loader.loaded, loader.most
        self.largest = max(loader.size(piece.weights) for piece in todo)
        return tree.unflatten(env[key] for key in results)

    def _cut(self, args: Any) -> Cut:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in self._cuts:
            self._cuts[key] = cut(self.apply, self.params, args, max(self.ahead // 4, 1))
        return self._cuts[key]


@dataclass
class _Asked:
    """The weights of a piece, on their way or there, and the bytes that they take until it has run: those
    that a later piece needs too, and that are still there, are counted with that.
    """

    piece: Piece
    weights: dict[Loaded, Future] = field(default_factory=dict)
    nbytes: int = 0
    results: Sequence[Any] = ()


class _Loader:
    """Brings the weights of pieces to the device, in order, in threads of its own."""

    def __init__(self, of: Streamed, waiting: deque[Piece], pool: ThreadPoolExecutor):
        self.of, self.waiting, self.pool = of, waiting, pool
        self.leaves = jax.tree.leaves(of.params)
        self.asked: deque[_Asked] = deque()
        self.running: deque[_Asked] = deque()
        self.holders: dict[Loaded, _Asked] = {}
        self.kept = self.size(of.kept)
        self.used = self.loaded = self.most = 0

    def weights(self) -> list[Any]:
        """Those of the next piece; those of later ones are asked for first, as far as the budget goes."""
        while self.waiting and self._has_room(self.waiting[0]):
            self._ask(self.waiting.popleft())
        self.running.append(self.asked.popleft())
        one = self.running[-1]
        return [one.weights[weight].result() for weight in one.piece.weights]

    def runs(self, results: Sequence[Any]) -> None:
        """The piece has its weights until it has these results."""
        self.running[-1].results = results

    def _has_room(self, piece: Piece) -> bool:
        """It waits for what runs only where else there would be nothing to run next."""
        while self.running and self.used + self._missing(piece) > self.of.ahead:
            if self.asked and not all(x.is_ready() for x in self.running[0].results):
                break
            self._release(self.running.popleft())
        return not self.asked or self.used + self._missing(piece) <= self.of.ahead

    def _release(self, one: _Asked) -> None:
        jax.block_until_ready(one.results)
        self.used -= one.nbytes
        self.holders = {weight: holder for weight, holder in self.holders.items() if holder is not one}

    def _ask(self, piece: Piece) -> None:
        one = _Asked(piece)
        for weight in piece.weights:
            one.weights[weight] = self._future(weight, one)
        self.most = max(self.most, self.used + self.kept)
        self.asked.append(one)

    def _future(self, weight: Loaded, one: _Asked) -> Future:
        nbytes = self.size([weight])
        if weight in self.of.kept:
            return self.of.kept[weight]
        if weight in self.holders:
            holder = self.holders[weight]
            holder.nbytes -= nbytes
            future = holder.weights[weight]
        else:
            future = self.pool.submit(_load, self.leaves, weight)
            self.loaded += nbytes
            if self.kept + nbytes <= self.of.keep:
                self.of.kept[weight], self.kept = future, self.kept + nbytes
                return future
            self.used += nbytes
        self.holders[weight], one.nbytes = one, one.nbytes + nbytes
        return future

    def _missing(self, piece: Piece) -> int:
        """Bytes of its weights that are not on the device."""
        return self.size(w for w in piece.weights if w not in self.of.kept and w not in self.holders)

    def size(self, weights: Iterable[Loaded]) -> int:
        return sum(_nbytes(self.leaves, w) for w in weights)


def _nbytes(leaves: Sequence[Any], weight: Loaded) -> int:
    whole = leaves[weight.leaf]
    return whole.nbytes if weight.row is None else whole.nbytes // whole.shape[0]


def _load(leaves: Sequence[Any], weight: Loaded) -> Any:
    """It on the device. On a CPU it is copied, or JAX would take NumPy's memory, or a file's, for its own."""
    whole = leaves[weight.leaf]
    x = whole if weight.row is None else whole[weight.row]
    return jax.device_put(np.array(x) if jax.default_backend() == "cpu" else x)

"""Tokens per second of a GPT-2 whose weights are streamed, against the batch size, as ZeRO-Inference has it.

`python -m benchmarks.stream` runs it on this machine's CPU: with all weights on the device (`jax.jit`),
streamed from the host's memory, with half of them kept, streamed from a file, and as one program whose
weights rest at the host (`AtHost`). With `JAX_PLATFORMS=cuda` and `--size gpt2-xl` it runs on a GPU. Weights
come once per forward pass, however large the batch, so that what streaming costs falls with it. The second
table is the plan's estimate for a TPU whose memory is too small for the weights, a GPT-2 XL of four times the
layers: a pass takes as long as the slower of its copies and all else.
"""

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the platform above)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AbstractMesh, AxisType  # noqa: E402

import shardax as sx  # noqa: E402
from models import gpt2  # noqa: E402

SIZES = {
    "small": gpt2.Config(vocab=4096, seq=64, layers=12, heads=8, model=512, scan=True),
    "gpt2-xl": replace(gpt2.SIZES["gpt2-xl"], dtype=jnp.bfloat16, scan=True),
}
LARGE = gpt2.Config(vocab=50257, seq=1024, layers=192, heads=25, model=1600, dtype=jnp.bfloat16, scan=True)
BATCHES = (1, 4, 16)
LARGE_BATCHES = (1, 4, 16, 32)
CHIP = "v5e"
ROUNDS = 3


def apply(config: gpt2.Config, params: Any, tokens_BS: jax.Array) -> jax.Array:
    """The logits of the next token."""
    return gpt2.logits(config, params, tokens_BS)[:, -1]


def written(params: Any, path: Path) -> Any:
    """The same tree, its arrays in a safetensors file."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}
    header, start = {}, 0
    for name, x in named.items():
        header[name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in named.values()))
    mapped = sx.zero.open_safetensors(path)
    return tree.unflatten(mapped[name] for name in named)


def at_host(config: gpt2.Config, params: Any) -> Callable[[Any], Any]:
    """The function as one program, which brings the weights of each layer itself."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    function = lambda params, tokens: apply(config, params, tokens)  # noqa: E731
    run = sx.shard_jit(function, mesh=mesh, transforms=[sx.zero.AtHost("params")])
    text = jax.ShapeDtypeStruct((1, config.seq), jnp.int32)
    resting = jax.tree.map(lambda x: x.sharding, sx.abstract_state(run, params, text))
    return partial(run, jax.device_put(params, resting))


def tokens_per_second(run: Callable[[Any], Any], batch: int, seq: int) -> float:
    tokens_BS = np.ones((batch, seq), np.int32)
    jax.block_until_ready(run(tokens_BS))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(tokens_BS))
        seconds.append(time.perf_counter() - start)
    return batch * seq / statistics.median(seconds)


def measured(config: gpt2.Config, ahead: int) -> None:
    params = jax.device_get(gpt2.init_params(config, jax.random.key(0)))
    size, function = sum(x.nbytes for x in jax.tree.leaves(params)), partial(apply, config)
    with tempfile.TemporaryDirectory() as folder:
        on_device = jax.device_put(params)
        runs = {
            "resident": partial(jax.jit(function), on_device),
            "half kept": sx.zero.stream(function, params, ahead, keep=size // 2),
            "host": sx.zero.stream(function, params, ahead),
            "disk": sx.zero.stream(function, written(params, Path(folder) / "weights"), ahead),
            "AtHost": at_host(config, params),
        }
        device, sizes = jax.devices()[0].device_kind, [f"{n / 2**20:.0f}" for n in (size, ahead)]
        print(f"Tokens/s on {device}, {sizes[0]} MiB of weights, at most {sizes[1]} ahead")
        print(f"{'batch':>8}" + "".join(f"{name:>12}" for name in runs) + f"{'host/resident':>16}")
        for batch in BATCHES:
            rates = [tokens_per_second(run, batch, config.seq) for run in runs.values()]
            row = f"{batch:>8}" + "".join(f"{rate:>12,.0f}" for rate in rates)
            print(row + f"{rates[2] / rates[0]:>16.2f}")


def estimated(config: gpt2.Config) -> None:
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
    params = jax.eval_shape(partial(gpt2.init_params, config), jax.random.key(0))
    function = lambda params, tokens: apply(config, params, tokens)  # noqa: E731
    step = sx.shard_jit(function, mesh=mesh, transforms=[sx.zero.AtHost("params")])
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    print(f"\nEstimated for one {CHIP} by the plan, {size / 2**30:.1f} GiB of weights at the host")
    print(f"{'batch':>8}{'tokens/s':>12}{'copies s':>12}{'all else s':>12}{'device GiB':>12}")
    for batch in LARGE_BATCHES:
        plan = step.plan(params, jax.ShapeDtypeStruct((batch, config.seq), "int32"))
        e = plan.estimate(CHIP)
        rate = batch * config.seq / max(e.host, e.seconds - e.host)
        peak = plan.memory().peak / 2**30
        print(f"{batch:>8}{rate:>12,.0f}{e.host:>12.3f}{e.seconds - e.host:>12.3f}{peak:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ahead", type=int, default=32, help="MiB that are loaded before they are used")
    parser.add_argument("--size", choices=SIZES, default="small", help="of what runs here")
    args = parser.parse_args()
    measured(SIZES[args.size], args.ahead * 2**20)
    estimated(LARGE)


if __name__ == "__main__":
    main()

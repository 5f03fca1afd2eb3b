"""What offload frees of a device's memory, and what it costs, measured on the devices of this machine.

`python -m benchmarks.offload` trains a GPT-2 by ZeRO stage 3 over all of them: with the state on the device,
with the optimizer's at the host, updated by either, and with parameters there too; and beside it as it is, by
`jax.jit`. Each is a process of its own, whose allocator counts the most bytes that were in use at once, as
those of GPUs and TPUs do; they compile side by side and run one after the other. The state is made on the
CPU, so that nothing but steps counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2
from models.devices import make_mesh
from models.steps import State, adamw, make_init, make_step

WAYS = {
    "jax.jit": None,
    "on the device": sx.zero.Zero("data", 3),
    "optimizer at the host": sx.zero.Zero("data", 3, offload="optimizer"),
    "updated there": sx.zero.Zero("data", 3, offload="optimizer", update_on="host"),
    "parameters too": sx.zero.Zero("data", 3, offload=("optimizer", "parameters")),
}
GIB = 2**30


def train(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way: its losses, median seconds of a step, and GiB of a device."""
    config = replace(gpt2.SIZES[args.size], dtype=jnp.bfloat16, scan=True, remat=True)
    tx = adamw(peak=1e-4, warmup=2, steps=100)
    init = make_init(partial(gpt2.init_params, config), tx)
    plain = make_step(lambda params, text_BS, _: gpt2.loss(config, params, text_BS), tx)
    mesh = make_mesh({"data": jax.device_count()})
    state = jax.eval_shape(init, jax.random.key(0))
    shape = args.steps + 1, args.batch, config.seq + 1
    text_NBS = np.random.default_rng(0).integers(config.vocab, size=shape, dtype="int32")
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    if (zero := WAYS[way]) is None:
        step = jax.jit(plain, in_shardings=(whole, split), donate_argnums=0)
        resting = jax.tree.map(lambda _: whole, state)
    else:
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
        step = sx.shard_jit(plain, transforms=[zero], **how)
        state = sx.abstract_state(step, state, text_NBS[0])
        resting = jax.tree.map(lambda x: x.sharding, state)
    run = step.lower(state, jax.ShapeDtypeStruct(shape[1:], text_NBS.dtype)).compile()
    print("compiled", flush=True)
    input()
    state = jax.block_until_ready(jax.device_put(_on_cpu(init), resting))
    return {**_timed(run, state, text_NBS, split), "allocated": _allocated(run)}


def _timed(run: Any, state: State, text_NBS: np.ndarray, split: NamedSharding) -> dict[str, Any]:
    rests, losses, seconds = _in_use(), [], []
    for text_BS in text_NBS:
        batch_BS = jax.device_put(text_BS, split)
        start = time.perf_counter()
        state, loss = run(state, batch_BS)
        losses.append(float(loss))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    return {
        "device": jax.devices()[0].device_kind,
        "seconds": statistics.median(seconds[1:]),
        "rests": rests.get("bytes_in_use", 0) / GIB,
        "most": _in_use().get("peak_bytes_in_use", 0) / GIB,
        "losses": losses,
    }


def _on_cpu(init: Callable[..., State]) -> State:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.device_get(jax.jit(init)(jax.random.key(0)))


def _in_use() -> dict[str, int]:
    return jax.local_devices()[0].memory_stats() or {}


def _allocated(run: Any) -> float:
    """GiB of a device, of arguments and temporaries, as it was compiled."""
    found = run.memory_analysis()
    return (found.argument_size_in_bytes + found.temp_size_in_bytes) / GIB


def _started(way: str, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.offload", "--way", way]
    for name in ("size", "batch", "steps"):
        command += [f"--{name}", str(getattr(args, name))]
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _each_in_turn(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    runs = {way: _started(way, args) for way in WAYS}
    try:
        for way, run in runs.items():
            if run.stdout is None or run.stdout.readline() != "compiled\n":
                raise SystemExit(f"{way!r} was not compiled")
        return {way: json.loads(run.communicate("run\n")[0]) for way, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=gpt2.SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--way", choices=WAYS, help="only this one, here, when a line comes in; as JSON")
    args = parser.parse_args(argv)
    if args.way:
        print(json.dumps(train(args.way, args)))
        return
    found = _each_in_turn(args)
    device = found["jax.jit"]["device"]
    print(f"GPT-2 '{args.size}', {args.batch} sequences, on {device}; GiB of one device")
    print(f"{'':<24}{'s/step':>9}{'at rest':>9}{'most':>9}{'as compiled':>13}  loss of the last step")
    for way, one in found.items():
        sizes = f"{one['rests']:>9.2f}{one['most']:>9.2f}{one['allocated']:>13.2f}"
        print(f"{way:<24}{one['seconds']:>9.3f}{sizes}  {one['losses'][-1]:.6f}")


if __name__ == "__main__":
    main()

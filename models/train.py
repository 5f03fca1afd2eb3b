"""The main job: trains a GPT-2 on the Python standard library's source, over all devices. `python -m
models.train --help`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, islice
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models import report, text
from models.checkpoints import Checkpoints
from models.devices import connect, fully_sharded, make_mesh, mesh_text
from models.job import Job, make_job
from models.options import OFFLOADS, Options, parse, stop
from models.steps import State
from models.trainers import Trainer, by_shardax, by_xla, on_one_device

SAMPLED = 200  # tokens
SHOWN = 60  # tokens before them
HELD_OUT = 8  # batches
EVALUATIONS = 8  # of the held-out loss, while it trains
DEAREST = 10  # lines of the plan
ROUNDS = 3
DECISIVE = ("size", "steps", "batch", "seq", "rate", "dropout", "seed")  # what the losses depend on


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    connect(options)
    mesh = make_mesh(options.mesh, options.processes)
    job = make_job(options)
    corpus = text.standard_library()
    with report.by_first_process():
        print(heading(options, mesh, job, corpus))
        if options.partitioner == "both":
            compare_speeds(options, mesh, job, corpus)
        else:
            train(options, mesh, job, corpus)


def heading(options: Options, mesh: Mesh, job: Job, corpus: text.Text) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(job.state.params))
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        f"GPT-2 '{options.size}', {size / 1e6:.2f} M parameters, vocabulary {job.vocab}, on {mesh.size} "
        f"{mesh.devices.flat[0].device_kind} devices{processes}, mesh {mesh_text(mesh.shape)}\n"
        f"corpus: {corpus.name}; a token is a byte or a file's end: {len(corpus.train) / 1e6:.1f} M and "
        f"{len(corpus.held_out) / 1e6:.1f} M"
    )


def train(options: Options, mesh: Mesh, job: Job, corpus: text.Text) -> None:
    trainer = make_trainer(options.partitioner, job, mesh, options)
    held_out: dict[int, float] = {}  # by the number of steps before; of a resumed run, those of this part

    def evaluate(step: int, state: State) -> None:
        if step % max(1, options.steps // EVALUATIONS) == 0 or step == options.steps:
            held_out[step] = held_out_loss(trainer, state, options, corpus)

    with checkpoints(options) as kept:
        state, losses = run(trainer, options, corpus, kept, evaluate)
    if not held_out:
        evaluate(options.steps, state)
    curves = {trainer.name: losses}
    if options.compare:
        curves["one device"] = run(on_one_device(job), options, corpus)[1]
        print(f"largest relative difference of the losses: {report.largest_difference(*curves.values()):.2e}")
    print(f"held-out loss: {held_out[options.steps]:.4f} nats a token")
    prompt = f"the first {options.seq} tokens of {corpus.first}, of which the last are shown before >>>"
    print(f"sample, after {prompt}:", report.indented(sample(trainer, state, options, corpus)), sep="\n")
    if trainer.plan is not None:
        print("plan of the train step, in brief:", trainer.plan.summary(DEAREST), sep="\n")
        files = report.write_plan(trainer.plan, options.out.parent)
        print(f"the whole plan, with the reason for each collective: {' and '.join(map(str, files))}")
    report.plot_losses(curves, options.out, held_out)
    print(f"losses plotted in {options.out}")


def make_trainer(partitioner: str, job: Job, mesh: Mesh, options: Options) -> Trainer:
    zero = options.zero
    if partitioner == "shardax":
        return by_shardax(job, mesh, zero, OFFLOADS.get(options.offload or "", ()))
    mesh = fully_sharded(mesh) if zero == 3 else mesh
    if zero:
        print(f"xla: {'FSDP by annotation' if zero == 3 else 'without ZeRO'}, mesh {mesh_text(mesh.shape)}")
    trainer = by_xla(job, mesh)
    for line in trainer.dropped:
        print(f"xla does not split {line}")
    return trainer


def checkpoints(options: Options) -> AbstractContextManager[Checkpoints | None]:
    if options.checkpoints is None:
        return nullcontext()
    return Checkpoints(
        options.checkpoints, options.save_every, {name: getattr(options, name) for name in DECISIVE}, stop
    )


def run(
    trainer: Trainer,
    options: Options,
    corpus: text.Text,
    kept: Checkpoints | None = None,
    evaluate: Callable[[int, State], None] = lambda step, state: None,
) -> tuple[State, list[float]]:
    """Trains from the newest saved state, else the first, to the last; after each step it may be evaluated.

    The speed shown leaves out the first step, which compiles, and the evaluations.
    """
    state, losses = begin(trainer, options, kept)
    batches = train_batches(options, corpus, trainer, len(losses))
    start, first = 0.0, len(losses)
    with report.progress(trainer.name, options.steps) as update:
        for step in range(first, options.steps):
            state, loss = trainer.step(state, next(batches))
            losses.append(float(loss))
            start = start or time.perf_counter()
            update(
                step + 1, losses[-1], tokens_per_second(step - first, options, time.perf_counter() - start)
            )
            if kept:
                kept.save(state, losses, last=step + 1 == options.steps)
            before = time.perf_counter()
            evaluate(step + 1, state)
            start += time.perf_counter() - before
    return state, losses


def begin(trainer: Trainer, options: Options, kept: Checkpoints | None) -> tuple[State, list[float]]:
    newest = kept.newest(trainer.state) if kept else None
    if newest is None:
        return trainer.init(jax.random.key(options.seed)), []
    state, losses = newest
    print(f"{trainer.name}: goes on after step {len(losses)}, saved in {options.checkpoints}", flush=True)
    return state, losses


def train_batches(options: Options, corpus: text.Text, trainer: Trainer, first: int = 0) -> Iterator[Any]:
    """The batch of each step from `first` on, placed as it rests: a process makes the rows that its devices
    hold.
    """
    for step in count(first):
        made = partial(text.batch, corpus.train, step, options.seed, options.batch, options.seq)
        yield (
            made() if trainer.batch is None else place(made, (options.batch, options.seq + 1), trainer.batch)
        )


def place(rows: Callable[[slice], np.ndarray], shape: tuple[int, int], sharding: NamedSharding) -> jax.Array:
    """The array of this shape, of which each process makes what its devices hold."""

    def shard(index: Any) -> np.ndarray:
        rows_of_shard, columns = index
        return rows(rows_of_shard)[:, columns]

    return jax.make_array_from_callback(shape, sharding, shard)


def tokens_per_second(steps: int, options: Options, seconds: float) -> float:
    return steps * options.batch * options.seq / seconds


def held_out_loss(trainer: Trainer, state: State, options: Options, corpus: text.Text) -> float:
    batches = text.even_batches(corpus.held_out, HELD_OUT, options.batch, options.seq)
    return statistics.fmean(float(trainer.loss(state.params, batch_BS)) for batch_BS in batches)


def sample(trainer: Trainer, state: State, options: Options, corpus: text.Text) -> str:
    """How the model goes on after the first held-out tokens, the prompt; `>>>` stands where it takes over."""
    tokens = list(corpus.held_out[: options.seq])
    for key in jax.random.split(jax.random.key(options.seed), SAMPLED):
        window_S = np.array(tokens[-options.seq :], np.int32)
        tokens.append(int(trainer.next_token(state.params, window_S, key)))
    prompt, sampled = tokens[: options.seq][-SHOWN:], tokens[options.seq :]
    return f"{text.to_text(prompt)}>>>{text.to_text(sampled)}"


def compare_speeds(options: Options, mesh: Mesh, job: Job, corpus: text.Text) -> None:
    """Both partitioners in turn, three times; between them they take the steps that were asked for. The ratio
    is the median of those of each round.
    """
    trainers = [make_trainer(name, job, mesh, options) for name in ("shardax", "xla")]
    races = [race(trainer, options, corpus) for trainer in trainers]
    rounds = [[next(r) for r in races] for _ in range(ROUNDS)]
    for trainer, speeds in zip(trainers, zip(*rounds, strict=True), strict=True):
        report_speed(trainer, speeds)
    print(f"shardax / xla: {statistics.median(ours / theirs for ours, theirs in rounds):.3f}")


def race(trainer: Trainer, options: Options, corpus: text.Text) -> Iterator[float]:
    """The tokens/s of each of its rounds; the first step, which compiles, is not timed."""
    batches = train_batches(options, corpus, trainer)
    state, _ = trainer.step(trainer.init(jax.random.key(options.seed)), next(batches))
    steps = max(1, options.steps // (2 * ROUNDS))
    while True:
        jax.block_until_ready(state)
        start = time.perf_counter()
        for batch_BS in islice(batches, steps):
            state, loss = trainer.step(state, batch_BS)
            float(loss)  # as in training, where each is shown
        yield tokens_per_second(steps, options, time.perf_counter() - start)


def report_speed(trainer: Trainer, speeds: Sequence[float]) -> None:
    rounds = ", ".join(f"{speed:,.0f}" for speed in speeds)
    print(f"{trainer.name}: {statistics.median(speeds):,.0f} tokens/s, the median of {rounds}")


if __name__ == "__main__":
    main()

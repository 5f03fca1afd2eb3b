"""The Conformer (Gulati et al. 2020, arXiv 2005.08100) on stages, for one device as it stands: only the
command at its end knows of meshes. `python -m models.conformer --mesh stage=4,data=2 --steps 200 --compare`

Two convolutions subsample log-mel features in front; the layers are scanned; behind them the phone of each
frame is classified. A layer is half a feed-forward, self-attention (rotary positions), the convolution
module, half a feed-forward, a layer norm. Batch norm counts over the rows of a microbatch; its statistics are
results of the loss, and their mean over the microbatches goes into the running ones.

Shape suffixes: L layers, B batch, R frames, S frames after subsampling (T: those attended to), F mel bands,
M model, N heads, D head, H hidden, K kernel, C channels, P phones.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import report, speech
from models.devices import make_mesh
from models.options import mesh_shape
from models.steps import adamw

SUBSAMPLED = 4


@dataclass(frozen=True)
class Config:
    layers: int = 8
    model: int = 64
    heads: int = 4
    kernel: int = 15
    channels: int = 16
    bands: int = 40
    phones: int = speech.PHONES
    momentum: float = 0.95  # of the running statistics
    dtype: Any = jnp.float32  # of activations; parameters, statistics and softmax stay float32
    remat: bool = False  # compute each layer again in the backward pass
    kept: tuple[str, ...] = ()  # of its products, those that are not

    def __post_init__(self):
        if self.model % (2 * self.heads):
            raise ValueError(
                f"model={self.model} must be a multiple of 2 x heads={2 * self.heads}: rotary positions take "
                "pairs; take other heads"
            )

    @property
    def hidden(self) -> int:
        return 4 * self.model


class State(NamedTuple):
    params: Any
    running: Any
    opt_state: Any


# The model


def weight_shapes(c: Config) -> dict[str, Any]:
    """By name: the shape and what its numbers are added over, 0 for ones, None for zeros."""
    L, M, H, N, D = c.layers, c.model, c.hidden, c.heads, c.model // c.heads
    half = {"norm": ((L, M), 0), "up": ((L, M, H), M), "down": ((L, H, M), H)}
    layers = {
        "first": half,
        "attention": {"norm": ((L, M), 0), "qkv": ((L, M, 3, N, D), M), "out": ((L, N, D, M), M)},
        "convolution": {
            "norm": ((L, M), 0),
            "gated": ((L, M, 2, M), M),
            "depthwise": ((L, c.kernel, M), c.kernel),
            "scale": ((L, M), 0),
            "shift": ((L, M), None),
            "out": ((L, M, M), M),
        },
        "second": half,
        "norm": ((L, M), 0),
    }
    flat = -(-c.bands // SUBSAMPLED) * c.channels
    front = {
        "first": ((3, 3, 1, c.channels), 9),
        "second": ((3, 3, c.channels, c.channels), 9 * c.channels),
        "out": ((flat, M), flat),
    }
    return {"front": front, "layers": layers, "head": ((M, c.phones), M)}


def _is_entry(x) -> bool:
    return isinstance(x, tuple)


def abstract_params(c: Config):
    return jax.tree.map(
        lambda entry: jax.ShapeDtypeStruct(entry[0], jnp.float32), weight_shapes(c), is_leaf=_is_entry
    )


def init_params(c: Config, key: Array):
    entries, tree = jax.tree.flatten(weight_shapes(c), is_leaf=_is_entry)
    keys = jax.random.split(key, len(entries))

    def made(entry, key):
        shape, over = entry
        if not over:
            return jnp.full(shape, 1.0 if over == 0 else 0.0)
        return jax.random.normal(key, shape) * over**-0.5

    return jax.tree.unflatten(tree, [made(*each) for each in zip(entries, keys, strict=True)])


def init_running(c: Config):
    """The running mean and variance of each layer's batch norm, [L, M] each."""
    shape = c.layers, c.model
    return {"mean": jnp.zeros(shape), "variance": jnp.ones(shape)}


def param_specs():
    """A spec for each part of the parameters: the layers lie on the stages."""
    return {"front": P(), "layers": P("stage"), "head": P()}


def loss(c: Config, params, features_BRF: Array, labels_BS: Array, running=None) -> tuple[Array, Any]:
    """The mean cross entropy of all frames, and the batch norms' statistics, [L, M] each: those of this
    batch, or the running ones, by which it is normalized where they are given."""
    logits_BSP, statistics = apply(c, params, features_BRF, running)
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSP, labels_BS)
    return losses_BS.mean(), statistics


def apply(c: Config, params, features_BRF: Array, running=None) -> tuple[Array, Any]:
    """Logits, float32[B, S, P], and the statistics as in `loss`."""
    body = rematted(c)
    x_BSM = sx.pipeline.outside(subsampled)(c, params["front"], features_BRF)
    x_BSM, statistics = lax.scan(lambda x, each: body(x, *each), x_BSM, (params["layers"], running))
    return (x_BSM @ params["head"].astype(c.dtype)).astype(jnp.float32), statistics


def rematted(c: Config) -> Callable[..., tuple[Array, Any]]:
    """A layer, of which the backward pass computes again what is not kept."""
    policy = jax.checkpoint_policies.save_only_these_names(*c.kept)
    own = partial(layer, c)
    return jax.checkpoint(own, prevent_cse=False, policy=policy) if c.remat else own


def subsampled(c: Config, w, features_BRF: Array) -> Array:
    """Two convolutions of stride two over frames and bands, and a dense layer."""
    x = features_BRF[..., None].astype(c.dtype)
    for name in "first", "second":
        kernel = w[name].astype(c.dtype)
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims))
    return x.reshape(*x.shape[:2], -1) @ w["out"].astype(c.dtype)


def layer(c: Config, x_BSM: Array, w, running) -> tuple[Array, Any]:
    w = jax.tree.map(lambda x: x.astype(c.dtype), w)
    x_BSM = x_BSM + 0.5 * feed_forward(w["first"], x_BSM)
    x_BSM = x_BSM + attention(w["attention"], x_BSM)
    y_BSM, statistics = convolution(c, w["convolution"], x_BSM, running)
    x_BSM = x_BSM + y_BSM
    x_BSM = x_BSM + 0.5 * feed_forward(w["second"], x_BSM)
    return norm(x_BSM, w["norm"]), statistics


def feed_forward(w, x_BSM: Array) -> Array:
    h_BSH = checkpoint_name(norm(x_BSM, w["norm"]) @ w["up"], "up")
    return checkpoint_name(jax.nn.silu(h_BSH) @ w["down"], "down")


def attention(w, x_BSM: Array) -> Array:
    qkv_3BSND = checkpoint_name(jnp.einsum("bsm,mknd->kbsnd", norm(x_BSM, w["norm"]), w["qkv"]), "qkv")
    q_BSND, k_BTND, v_BTND = qkv_3BSND
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", rotated(q_BSND), rotated(k_BTND))
    scores_BNST = scores_BNST.astype(jnp.float32) * q_BSND.shape[-1] ** -0.5
    y_BSND = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores_BNST).astype(x_BSM.dtype), v_BTND)
    return checkpoint_name(jnp.einsum("bsnd,ndm->bsm", y_BSND, w["out"]), "out")


def convolution(c: Config, w, x_BSM: Array, running) -> tuple[Array, Any]:
    """Gated linear unit, depthwise convolution, batch norm, swish; and the statistics."""
    gated_2BSM = checkpoint_name(jnp.einsum("bsm,mkn->kbsn", norm(x_BSM, w["norm"]), w["gated"]), "gated")
    value_BSM, gate_BSM = gated_2BSM
    x_BSM = depthwise(w["depthwise"], value_BSM * jax.nn.sigmoid(gate_BSM))
    x_BSM, statistics = batch_norm(w["scale"], w["shift"], x_BSM, running)
    return checkpoint_name(jax.nn.silu(x_BSM) @ w["out"], "out"), statistics


def depthwise(w_KM: Array, x_BSM: Array) -> Array:
    return lax.conv_general_dilated(
        x_BSM,
        w_KM[:, None],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x_BSM.shape[-1],
    )


def batch_norm(scale_M: Array, shift_M: Array, x_BSM: Array, running) -> tuple[Array, Any]:
    x32_BSM = x_BSM.astype(jnp.float32)
    if running is None:
        mean_M = x32_BSM.mean((0, 1))
        running = {"mean": mean_M, "variance": ((x32_BSM - mean_M) ** 2).mean((0, 1))}
    scaled_BSM = (x32_BSM - running["mean"]) * lax.rsqrt(running["variance"] + 1e-5)
    return scaled_BSM.astype(x_BSM.dtype) * scale_M + shift_M, running


def norm(x_BSM: Array, scale_M: Array) -> Array:
    x32_BSM = x_BSM.astype(jnp.float32)
    x32_BSM = x32_BSM - x32_BSM.mean(-1, keepdims=True)
    scaled_BSM = x32_BSM * lax.rsqrt((x32_BSM**2).mean(-1, keepdims=True) + 1e-6)
    return scaled_BSM.astype(x_BSM.dtype) * scale_M


def rotated(x_BSND: Array) -> Array:
    """Rotary positions (Su et al. 2021)."""
    sequence, half = x_BSND.shape[1], x_BSND.shape[-1] // 2
    place_S, pair_D = (jnp.arange(size, dtype=jnp.float32) for size in (sequence, half))
    angles = place_S[:, None] * 10_000.0 ** (-pair_D / half)
    sin, cos = (f(angles)[:, None].astype(x_BSND.dtype) for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x_BSND, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# Training


def make_step(c: Config, tx: optax.GradientTransformation, value_and_grad: Callable[..., Any]):
    """The function (state, features, labels) -> (next state, loss). `value_and_grad` returns the statistics
    of each microbatch, [microbatches, L, M]."""

    def step(state: State, features_BRF: Array, labels_BS: Array) -> tuple[State, Array]:
        (value, statistics), grads = value_and_grad(partial(loss, c))(state.params, features_BRF, labels_BS)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        running = jax.tree.map(
            lambda old, new: c.momentum * old + (1 - c.momentum) * new.mean(0), state.running, statistics
        )
        return State(optax.apply_updates(state.params, updates), running, opt_state), value

    return step


def accumulated(microbatches: int):
    """What `sx.pipeline.value_and_grad(..., has_aux=True)` computes, one microbatch after the other."""

    def transform(loss):
        def run(params, *batch):
            rows = [jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1) for x in batch]

            def add(total, rows):
                (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, *rows)
                return jax.tree.map(jnp.add, total, (value, grads)), aux

            zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
            total, aux = lax.scan(add, zeros, rows)
            value, grads = jax.tree.map(lambda x: x / microbatches, total)
            return (value, aux), grads

        return run

    return transform


def init_state(c: Config, tx: optax.GradientTransformation, key: Array) -> State:
    params = init_params(c, key)
    return State(params, init_running(c), tx.init(params))


def main(argv=None) -> None:
    options = _parser().parse_args(argv)
    mesh = make_mesh(options.mesh)
    c = Config(layers=options.layers, model=options.model)
    tx = adamw(options.rate, options.steps // 10, options.steps)
    microbatches = options.microbatches or 2 * mesh.shape["stage"]
    pipelined = partial(
        sx.pipeline.value_and_grad, microbatches=microbatches, schedule=options.schedule, has_aux=True
    )
    specs = State(param_specs(), P("stage"), None)
    batch = P("data") if "data" in mesh.shape else P()
    steps = {
        "pipelined": sx.shard_jit(
            make_step(c, tx, pipelined), mesh=mesh, in_shardings=(specs, batch, batch), donate_argnums=0
        )
    }
    if options.compare:
        steps["one device"] = jax.jit(make_step(c, tx, accumulated(microbatches)), donate_argnums=0)
    losses = {}
    for name, step in steps.items():
        state, losses[name] = train(name, step, init_state(c, tx, jax.random.key(options.seed)), options, c)
        print(f"{name}: held out, by the running statistics: {held_out(c, state, options)}")
    if options.compare:
        difference = report.largest_difference(*losses.values())
        print(f"largest relative difference of the losses: {difference:.2e}")


def train(name: str, step, state: State, options, c: Config) -> tuple[State, list[float]]:
    losses = []
    with report.progress(name, options.steps) as update:
        for features_BRF, labels_BS in batches(options, c, range(options.steps)):
            state, value = step(state, features_BRF, labels_BS)
            losses.append(float(value))
            update(len(losses), losses[-1], 0)
    print(f"{name}: loss of the last ten steps {sum(losses[-10:]) / len(losses[-10:]):.4f} nats a frame")
    return state, losses


def batches(options, c: Config, steps) -> Iterator[speech.Batch]:
    for step in steps:
        yield speech.batch(step, options.seed, options.batch, options.frames, c.bands, SUBSAMPLED)


def held_out(c: Config, state: State, options) -> str:
    """Loss and accuracy on batches that nobody trained on."""

    @jax.jit
    def scores(params, running, features_BRF, labels_BS):
        logits_BSP, _ = apply(c, params, features_BRF, running)
        losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSP, labels_BS)
        return jnp.stack([losses_BS.mean(), (logits_BSP.argmax(-1) == labels_BS).mean()])

    params, running = jax.device_get((state.params, state.running))
    found = [scores(params, running, *batch) for batch in batches(options, c, range(10**6, 10**6 + 4))]
    value, right = jnp.stack(found).mean(0)
    return f"loss {value:.4f} nats a frame, {100 * right:.1f} % of frames right"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="conformer",
        description="Trains a Conformer on speech-like data, its layers on stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = partial(parser.add_argument, type=int)
    parser.add_argument("--mesh", type=mesh_shape, default="stage=4,data=2", metavar="AXIS=SIZE,...")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--compare", action="store_true", help="train on one device as well")
    add("--steps", default=200)
    add("--batch", default=32)
    add("--frames", default=128)
    add("--layers", default=8)
    add("--model", default=64)
    add("--seed", default=0)
    add("--microbatches", help="default: two for each stage")
    return parser


if __name__ == "__main__":
    main()

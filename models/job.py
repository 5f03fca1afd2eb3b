"""What is trained: a GPT-2's init, train step, loss and next token, as functions for one device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array

import shardax as sx
from models import gpt2
from models.options import Options
from models.steps import Init, State, Step, adamw, make_init, make_step

WARMUP = 20
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Job:
    init: Init
    step: Step
    pipelined: Step | None  # the step with its layers on stages
    loss: Callable[[Any, Any], Array]  # of parameters and a batch
    next_token: Callable[[Any, Any, Array], Array]  # of parameters, the text so far, and a random key
    batch: jax.ShapeDtypeStruct
    vocab: int

    @property
    def state(self) -> State:
        """The shapes and dtypes of the state."""
        return jax.eval_shape(self.init, jax.random.key(0))


def make_job(options: Options) -> Job:
    on_stages = options.schedule is not None
    config = replace(gpt2.SIZES[options.size], seq=options.seq, dropout=options.dropout, scan=on_stages)
    tx = adamw(options.rate, WARMUP, options.steps)

    def train_loss(params, text_BS, step):
        key = jax.random.fold_in(jax.random.key(options.seed), step) if config.dropout else None
        return gpt2.loss(config, params, text_BS, key)

    return Job(
        init=make_init(lambda key: gpt2.init_params(config, key), tx),
        step=make_step(train_loss, tx),
        pipelined=make_step(train_loss, tx, pipelined(options)) if on_stages else None,
        loss=lambda params, text_BS: gpt2.loss(config, params, text_BS),
        next_token=lambda params, text_S, key: next_token(config, params, text_S, key),
        batch=jax.ShapeDtypeStruct((options.batch, options.seq + 1), "int32"),
        vocab=config.vocab,
    )


def pipelined(options: Options) -> Callable[..., Any]:
    return partial(sx.pipeline.value_and_grad, microbatches=options.microbatches, schedule=options.schedule)


def next_token(config: gpt2.Config, params, text_S: Array, key: Array) -> Array:
    logits_V = gpt2.logits(config, params, text_S[None])[0, -1]
    return jax.random.categorical(key, logits_V / TEMPERATURE)

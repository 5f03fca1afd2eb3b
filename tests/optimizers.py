"""Every gradient transformation of optax and optax.contrib, by name, made ready to minimize a loss.

The names are read off the packages. A new one is made from its signature where it takes a learning rate or
nothing; else `make` fails for it, and its line is missing here.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

RATE = 0.05
Tx = optax.GradientTransformation


def names() -> list[str]:
    """Public functions that make gradient transformations. The last two do not say so in their
    annotations.
    """
    found = {
        n
        for package in (optax, contrib)
        for n in dir(package)
        if n[0].islower() and _makes_one(getattr(package, n))
    }
    return sorted(found | {"scale_by_factored_rms", "hutchinson_estimator_diag_hessian"})


def make(name: str) -> Tx:
    """The transformation with arguments that make it descend."""
    if name in MADE:
        return MADE[name]()
    function = getattr(optax, name, None) or getattr(contrib, name)
    required = _required(function)
    if required == ["learning_rate"]:
        return function(RATE)
    if not required:
        return function() if name in DESCEND else descending(function())
    raise KeyError(f"optax's {name}{tuple(required)} has no line in tests/optimizers.py")


def descending(tx: Tx) -> Tx:
    """What only scales gradients, followed by a step against them."""
    return optax.chain(tx, optax.scale(-RATE))


def _makes_one(function: Any) -> bool:
    return "GradientTransformation" in str(getattr(function, "__annotations__", {}).get("return"))


def _required(function: Any) -> list[str]:
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _halves(params):
    """Labels: matrices and the rest."""
    return jax.tree.map(lambda p: "matrices" if p.ndim == 2 else "rest", params)


def _matrices(params):
    return jax.tree.map(lambda p: p.ndim == 2, params)


def _not_matrices(params):
    return jax.tree.map(lambda p: p.ndim != 2, params)


def _rows_and_columns(params):
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(), params)


def _every_second(step, **extra):
    return step % 2 == 0


def adam() -> Tx:
    return optax.adam(RATE, eps=1e-5)


DESCEND = {
    *(
        "adadelta",
        "adafactor",
        "chain",
        "cocob",
        "dadapt_adamw",
        "lbfgs",
        "momo",
        "momo_adam",
        "named_chain",
        "polyak_sgd",
    ),
    *("prodigy", "schedule_free_adamw", "schedule_free_sgd", "set_to_zero"),
}

MADE: dict[str, Callable[[], Tx]] = {
    "acprop": lambda: contrib.acprop(
        RATE, eps=1e-3
    ),  # its denominators are a step old, and at first nearly zero
    "adadelta": lambda: optax.adadelta(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "adaptive_grad_clip": lambda: descending(optax.adaptive_grad_clip(0.1)),
    "add_noise": lambda: descending(optax.add_noise(0.1, 0.5, seed=3)),
    "apply_every": lambda: descending(optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.2), optax.add_decayed_weights(0.1), adam()),
    "clip": lambda: descending(optax.clip(0.01)),
    "clip_by_block_rms": lambda: descending(optax.clip_by_block_rms(0.01)),
    "clip_by_global_norm": lambda: descending(optax.clip_by_global_norm(0.2)),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), _every_second),
    "conditionally_transform": lambda: optax.chain(
        optax.conditionally_transform(optax.clip(0.01), _every_second), optax.sgd(RATE)
    ),
    "differentially_private_aggregate": lambda: descending(
        contrib.differentially_private_aggregate(0.1, 0.2, seed=3)
    ),
    "dpsgd": lambda: contrib.dpsgd(RATE, 0.1, 0.2, seed=3, momentum=0.9),
    "ema": lambda: descending(optax.ema(0.9)),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.chain(
        optax.freeze({"up": True, "bias": False, "down": False, "gain": True}), adam()
    ),
    "galore": lambda: contrib.galore(RATE, rank=3, base_optimizer=optax.trace(0.9)),
    "hutchinson_estimator_diag_hessian": lambda: descending(
        contrib.hutchinson_estimator_diag_hessian(jax.random.PRNGKey(1))
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(RATE, 0.0, 4)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(RATE),
    "lbfgs": lambda: optax.lbfgs(memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(5)),
    "lookahead": lambda: optax.lookahead(adam(), 2, 0.5),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), _matrices), optax.sgd(RATE)),
    "measure_with_ema": lambda: optax.chain(
        optax.monitor({"norm": optax.measure_with_ema(optax.global_norm, 0.9)}), optax.sgd(RATE)
    ),
    "mechanize": lambda: contrib.mechanize(optax.sgd(RATE), s_init=0.1),
    "multi_transform": lambda: optax.multi_transform(
        {"matrices": contrib.muon(RATE), "rest": adam()}, _halves
    ),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", adam())),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, seed=3),
    "partition": lambda: optax.partition({"matrices": optax.lion(0.01), "rest": optax.sgd(RATE)}, _halves),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(RATE), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.3)
    ),
    "sam": lambda: contrib.sam(adam(), _ascent()),
    "scale": lambda: optax.scale(-RATE),
    "scale_by_acprop": lambda: descending(contrib.scale_by_acprop(eps=1e-3)),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
    ),
    "scale_by_factored_rms": lambda: descending(optax.scale_by_factored_rms(min_dim_size_to_factor=8)),
    "scale_by_galore": lambda: descending(contrib.scale_by_galore(rank=3, base_optimizer=optax.trace(0.9))),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(RATE),
    "scale_by_lbfgs": lambda: descending(optax.scale_by_lbfgs(memory_size=3)),
    "scale_by_muon": lambda: optax.masked(
        descending(contrib.scale_by_muon(weight_dimension_numbers=_rows_and_columns)), _matrices
    ),
    "scale_by_rprop": lambda: optax.scale_by_rprop(RATE),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -RATE / (1 + count)),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(RATE), RATE),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask={"up": True, "bias": False, "down": False, "gain": False}
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.global_norm), optax.sgd(RATE)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam()),
    "stateless": lambda: optax.stateless(lambda g, p: jax.tree.map(lambda g, p: -RATE * (g + 0.1 * p), g, p)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -RATE * jnp.tanh(g)),
    "trace": lambda: descending(optax.trace(0.9, nesterov=True)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(RATE)),
}


def _ascent() -> Tx:
    """The adversary of sharpness-aware minimization: one normalized step up."""
    return optax.chain(contrib.normalize(), optax.sgd(RATE))


def _under_cond() -> Tx:
    """An update that `lax.cond` chooses, as hand-written skipping of steps does."""
    inner = adam()

    def update(grads, state, params=None):
        good = optax.global_norm(grads) < 0.5
        return jax.lax.cond(
            good,
            lambda: inner.update(grads, state, params),
            lambda: (jax.tree.map(jnp.zeros_like, grads), state),
        )

    return Tx(inner.init, update)


def _steps(**options) -> Tx:
    return optax.MultiSteps(adam(), 2, **options).gradient_transformation()


COMBINATIONS: dict[str, Callable[[], Tx]] = {
    "clip_chain_decay_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.2),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 5), eps=1e-5),
    ),
    "ema_of_adam": lambda: optax.chain(adam(), optax.ema(0.9)),
    "inject_clipped": lambda: optax.chain(
        optax.clip(0.1), optax.inject_hyperparams(optax.lion)(learning_rate=0.01)
    ),
    "masked_decay": lambda: optax.adamw(RATE, eps=1e-5, mask=_matrices),
    "multi_steps": _steps,
    "multi_steps_of_sums": lambda: _steps(use_grad_mean=False),
    "multi_steps_skipping": lambda: _steps(should_skip_update_fn=optax.skip_not_finite),
    "muon_and_frozen": lambda: optax.multi_transform(
        {"matrices": contrib.muon(RATE), "rest": optax.set_to_zero()}, _halves
    ),
    "lookahead_of_masked": lambda: optax.lookahead(
        optax.chain(optax.masked(optax.trace(0.9), _not_matrices), adam()), 2, 0.5
    ),
    "under_cond": _under_cond,
    "zero_nans_then_adam": lambda: optax.chain(optax.zero_nans(), adam()),
}

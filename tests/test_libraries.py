"""A program of each of several libraries for science: what it computes on a mesh, of Auto and of Explicit axes, is
what it computes on one device, and where the batch is split little is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from examples.third_party import page

pytestmark = pytest.mark.mixed_dtypes

MESHES = {
    kind.name: jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}
BOTH = P(("x", "y"))
PAGE = page.PAGE.read_text()
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, "float32")


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@dataclass(frozen=True)
class Program:
    """A function of arrays, and the batch dim of each argument if it has one: "b" is split, "" is not.

    `make` gives the function, when its library is there; `args` are as for 13 elements of a batch, or of any other
    number.
    """

    make: Callable[[], Callable[..., Any]]
    args: Callable[[int], tuple[Any, ...]]
    batched: str
    library: str = "jax"
    tolerance: float = 1e-5

    def function(self):
        pytest.importorskip(self.library, reason=f"{self.library} is not installed: it is in the extra `dev`")
        return self.make()

    def specs(self, spec):
        return tuple(spec if b == "b" else P() for b in self.batched)


@cache
def on_one_device(name: str):
    program = PROGRAMS[name]
    f, args = program.function(), program.args(13)
    return f, args, jax.block_until_ready(jax.jit(f)(*args))


def with_gradient(f):
    return jax.value_and_grad(f, has_aux=True)


# The programs


def equinox_loop():
    """A checkpointed loop for each element of the batch."""
    import equinox.internal as eqxi

    def trajectory(w, x):
        def go_on(carry):
            step, y = carry
            return (step < 5) & (jnp.abs(y).max() < 3)

        def step(carry):
            return carry[0] + eqxi.nonbatchable(1), jnp.tanh(carry[1] * w) * 1.4 + 0.5

        return eqxi.while_loop(go_on, step, (0, x), kind="checkpointed", checkpoints=3, max_steps=8)

    @with_gradient
    def loss(w, x):
        steps, y = jax.vmap(trajectory, (None, 0))(w, x)
        return (y * eqxi.unvmap_max(jnp.arange(3))).sum(), (steps, y)

    return loss


def diffrax_solve():
    """A van der Pol oscillator, by steps that each initial value chooses for itself."""
    import diffrax

    def solve(mu, y):
        field = diffrax.ODETerm(lambda t, y, mu: jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]]))
        steps = diffrax.PIDController(rtol=1e-2, atol=1e-3)
        found = diffrax.diffeqsolve(
            field,
            diffrax.Heun(),
            0.0,
            1.0,
            0.1,
            y,
            args=mu,
            stepsize_controller=steps,
            max_steps=16,
            throw=False,
        )
        return found.ys[0], found.stats["num_steps"]

    @with_gradient
    def loss(mu, y):
        ys, steps = jax.vmap(solve, (None, 0))(mu, y)
        return (ys**2).mean(), (ys, steps)

    return loss


def numpyro_nuts():
    """Steps of the No-U-Turn sampler, on data whose rows are split, and the gradient of the density."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.hmc import hmc
    from numpyro.infer.util import initialize_model, log_density

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    def sample(x, y):
        info = initialize_model(jax.random.key(0), model, model_args=(x, y))
        start, kernel = hmc(info.potential_fn, algo="NUTS")
        state = start(
            info.param_info, num_warmup=2, step_size=0.05, rng_key=jax.random.key(1), max_tree_depth=3
        )
        state = jax.lax.fori_loop(0, 3, lambda i, state: kernel(state), state)
        drawn = {"w": jnp.ones(3), "scale": jnp.float32(2)}
        density = lambda x: log_density(model, (x, y), {}, drawn)[0]  # noqa: E731
        return state.z, state.potential_energy, state.num_steps, jax.grad(density)(x)

    return sample


def blackjax_chains():
    """Chains of HMC, and a step of NUTS, of the same posterior; and how the draws change with the data."""
    import blackjax

    def sample(x, y, start, keys):
        draw = lambda y: positions(x, y, start, keys)  # noqa: E731
        (found, accepted), moved = jax.jvp(draw, (y,), (jnp.ones_like(y),))
        return found, accepted, moved[0]

    def positions(x, y, start, keys):
        def log_density(q):
            return -0.5 * ((y - x @ q) ** 2).sum() - 0.5 * (q**2).sum()

        mass = jnp.ones(3)
        hmc = blackjax.hmc(log_density, step_size=0.05, inverse_mass_matrix=mass, num_integration_steps=3)
        nuts = blackjax.nuts(log_density, step_size=0.05, inverse_mass_matrix=mass, max_num_doublings=3)

        def chain(q, key):
            step = lambda state, key: hmc.step(key, state)  # noqa: E731
            state, info = jax.lax.scan(step, hmc.init(q), jax.random.split(key, 3))
            return nuts.step(key, nuts.init(state.position))[0].position, info.is_accepted

        return jax.vmap(chain)(start, keys)

    return sample


def jaxopt_fits():
    """L-BFGS with its line search, and a proximal gradient, over rows that are split; the implicit derivative
    of its solution.
    """
    import jaxopt

    def fit(x, y):
        def loss(w):
            return jnp.mean(jnp.log1p(jnp.exp(-jnp.sign(y) * (x @ w)))) + 0.01 * (w @ w)

        def squares(w):
            return jnp.mean((x @ w - y) ** 2)

        smooth = jaxopt.LBFGS(loss, maxiter=5).run(jnp.zeros(3)).params
        lasso = jaxopt.ProximalGradient(squares, jaxopt.prox.prox_lasso, maxiter=5)
        solved = lambda scale: lasso.run(jnp.zeros(3), hyperparams_prox=scale).params  # noqa: E731
        return smooth, solved(0.05), jax.grad(lambda scale: solved(scale).sum())(0.05)

    return fit


def lineax_solves():
    """A system for each element of the batch, by conjugate gradients and by GMRES."""
    import lineax as lx

    def solve(a, b):
        matrix = a @ a.T + 3 * jnp.eye(4)
        definite = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        x = lx.linear_solve(definite, b, lx.CG(rtol=1e-5, atol=1e-5)).value
        general = lx.MatrixLinearOperator(matrix + a)
        return x, lx.linear_solve(general, b, lx.GMRES(rtol=1e-5, atol=1e-5), throw=False).value

    @with_gradient
    def loss(a, b):
        x, y = jax.vmap(solve)(a, b)
        return (x * x + y).sum(), (x, y)

    return loss


def optimistix_finds():
    """A root for each element of the batch, and a minimum by BFGS."""
    import optimistix as optx

    def root(p, y):
        f = lambda y, p: y - jnp.tanh(y * p + 0.3) - jnp.arange(3)  # noqa: E731
        newton = optx.Newton(rtol=1e-5, atol=1e-5)
        return optx.root_find(f, newton, y, p, max_steps=6, throw=False).value

    @with_gradient
    def loss(p, y):
        roots = jax.vmap(root, (None, 0))(p, y)
        bowl = lambda z, a: ((z - a) ** 2 * jnp.arange(1, 4)).sum() + (z[0] * z[1]) ** 2  # noqa: E731
        bfgs = optx.BFGS(rtol=1e-4, atol=1e-4)
        lowest = optx.minimise(bowl, bfgs, jnp.ones(3), y.mean(0), max_steps=8, throw=False).value
        return roots.sum() + lowest.sum(), (roots, lowest)

    return loss


def discs():
    """Discs in a plane that push each other and a floor, over time: each body sees all others."""

    def acceleration(k, radius, q, v):
        apart = q[:, None] - q[None]
        distance = jnp.sqrt((apart**2).sum(-1) + 1e-6)
        depth = jnp.maximum(radius[:, None] + radius[None] - distance, 0) * (1 - jnp.eye(len(radius)))
        pushed = ((k * depth / distance)[..., None] * apart).sum(1)
        floor = k * jnp.maximum(radius - q[:, 1], 0)
        return pushed + jnp.stack([jnp.zeros_like(floor), floor - 9.8], 1) - 0.1 * v

    @with_gradient
    def simulate(k, q, v, radius):
        def step(state, _):
            q, v = state
            v = v + 0.01 * acceleration(k, radius, q, v)
            return (q + 0.01 * v, v), (v**2).sum()

        (q, v), energy = jax.lax.scan(step, (q, v), length=7)
        return (q**2).mean() + energy.mean(), (q, v, energy)

    return simulate


def jointed_arms():
    """Arms of two links, one for each element of the batch, that bounce off their limits."""

    def arm(gains, state):
        def step(state, _):
            angle, speed = state[:2], state[2:]
            c = jnp.cos(angle[1])
            mass = jnp.array([[2.0, 0.5], [0.5, 1.0]]) + 0.4 * c * jnp.array([[2.0, 1.0], [1.0, 0.0]])
            limit = 40 * (jnp.clip(angle, -1.0, 1.0) - angle)
            force = limit - gains * speed - 3 * jnp.sin(angle)
            speed = speed + 0.02 * jnp.linalg.solve(mass, force)
            state = jnp.concatenate([angle + 0.02 * speed, speed])
            return state, state[:2]

        return jax.lax.scan(step, state, length=6)

    @with_gradient
    def loss(gains, states):
        last, path = jax.vmap(arm, (None, 0))(gains, states)
        return (last**2).sum(), path

    return loss


PROGRAMS = {
    "equinox": Program(equinox_loop, lambda n: (normal(6), normal(n, 6)), " b", "equinox"),
    "diffrax": Program(diffrax_solve, lambda n: (np.float32(1.3), normal(n, 2)), " b", "diffrax"),
    "numpyro": Program(numpyro_nuts, lambda n: (normal(3 * n, 3), normal(3 * n)), "bb", "numpyro", 1e-4),
    "blackjax": Program(
        blackjax_chains,
        lambda n: (normal(7, 3), normal(7), normal(n, 3), jax.random.split(jax.random.key(0), n)),
        "  bb",
        "blackjax",
    ),
    "jaxopt": Program(jaxopt_fits, lambda n: (normal(3 * n, 3), normal(3 * n)), "bb", "jaxopt", 1e-4),
    "lineax": Program(lineax_solves, lambda n: (normal(n, 4, 4), normal(n, 4)), "bb", "lineax", 1e-4),
    "optimistix": Program(
        optimistix_finds, lambda n: (np.float32(0.4), normal(n, 3)), " b", "optimistix", 1e-4
    ),
    "discs": Program(
        discs,
        lambda n: (np.float32(50), 2 + normal(n, 2), normal(n, 2), 0.4 + 0.1 * np.abs(normal(n))),
        " bbb",
    ),
    "arms": Program(jointed_arms, lambda n: (np.float32([0.5, 0.2]), normal(n, 4)), " b"),
}


LONG = (
    "blackjax",
    "diffrax",
    "lineax",
    "optimistix",
)  # to compile: once, on Explicit axes among the slow tests


@pytest.mark.parametrize(
    "name, kind",
    [pytest.param(name, "Auto", marks=[pytest.mark.once] * (name in LONG)) for name in PROGRAMS]
    + [
        pytest.param(name, "Explicit", marks=pytest.mark.slow if name in LONG else pytest.mark.once)
        for name in PROGRAMS
    ],
)
def test_computes_what_one_device_does(name, kind):
    """And none of its primitives runs replicated for want of a rule: that is a warning, and an error here."""
    f, args, wanted = on_one_device(name)
    program = PROGRAMS[name]
    step = sx.shard_jit(f, mesh=MESHES[kind], in_shardings=program.specs(P("x")))
    found = step(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(other.dtype, jnp.floating):
            scale = max(1.0, float(np.abs(other).max()))
            np.testing.assert_allclose(one, other, atol=program.tolerance * scale)
        else:
            np.testing.assert_array_equal(one, other)


SENT = {  # bytes that a device sends, where it has 512 elements of the batch: a loop's are those of an iteration
    "equinox": 51,
    "diffrax": 16,
    "blackjax": 6,
    "lineax": 274,
    "arms": 95,
}


@pytest.mark.once
@pytest.mark.parametrize("name", SENT)
def test_a_batch_that_is_split_sends_what_its_loops_ask(name):
    """Whether a loop goes on, and sums over the elements: nothing of the elements themselves."""
    program, count = PROGRAMS[name], 4096
    f, args = program.function(), program.args(count)
    outs = jax.tree.map(lambda x: BOTH if x.shape[:1] == (count,) else P(), jax.eval_shape(f, *args))
    options = sx.Options(chip="slow", idle_axes=False)  # to which no gather is cheap enough
    step = sx.shard_jit(
        f, mesh=MESHES["Auto"], in_shardings=program.specs(BOTH), out_shardings=outs, options=options
    )
    assert 0 < step.plan(*args).comm_bytes <= SENT[name] * (1 if jax.__version__ in PAGE else 1.2)


def test_the_page_says_what_is_sent():
    rows = [line.lower() for line in PAGE.splitlines() if line.startswith("| ")]
    for name, sent in SENT.items():
        assert any(name in row and row.endswith(f"| {sent} |") for row in rows)

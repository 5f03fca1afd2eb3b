"""Writes docs/third_party.md: ten train steps after other people's, their losses over a mesh and on one
device.

python -m examples.third_party.page
"""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax

from examples.run import MESH, Example, TrainStep
from models.devices import make_mesh, mesh_text

PAGE = Path(__file__).parents[2] / "docs" / "third_party.md"
BELOW = "## Programs of other libraries\n"
STEPS = 12
SHOWN = (0, 5, 11)
JAX = "shard_jit"
NNX = "shardax.flax.shard_jit"
# name: (what it is after, where that is, the decorator)
ROWS = {
    "third_party.optax_quickstart": (
        "optax, Getting started",
        "https://optax.readthedocs.io/en/latest/getting_started.html",
        JAX,
    ),
    "third_party.optax_adversarial": (
        "optax, Adversarial training",
        "https://github.com/google-deepmind/optax/blob/main/examples/adversarial_training.ipynb",
        JAX,
    ),
    "third_party.optax_nanolm": (
        "optax, Character-level transformer",
        "https://github.com/google-deepmind/optax/blob/main/examples/nanolm.ipynb",
        JAX,
    ),
    "third_party.flax_mnist": (
        "Flax linen, MNIST",
        "https://github.com/google/flax/tree/main/examples/mnist",
        JAX,
    ),
    "third_party.flax_imagenet": (
        "Flax linen, ImageNet",
        "https://github.com/google/flax/tree/main/examples/imagenet",
        JAX,
    ),
    "third_party.flax_seq2seq": (
        "Flax linen, seq2seq",
        "https://github.com/google/flax/tree/main/examples/seq2seq",
        JAX,
    ),
    "flax_nnx": (
        "Flax nnx, MNIST tutorial",
        "https://flax.readthedocs.io/en/latest/mnist_tutorial.html",
        NNX,
    ),
    "equinox_cnn": (
        "Equinox, Convolutional Neural Network on MNIST",
        "https://docs.kidger.site/equinox/examples/mnist/",
        JAX,
    ),
    "haiku_vae": (
        "Haiku, Variational autoencoder",
        "https://github.com/google-deepmind/dm-haiku/blob/main/examples/vae.py",
        JAX,
    ),
    "raw_jax": (
        "JAX, MNIST classifier from scratch",
        "https://github.com/jax-ml/jax/blob/main/examples/mnist_classifier_fromscratch.py",
        JAX,
    ),
}
HEAD = f"""# Ten train steps after other people's

Each train step has the structure of a public example, with our own code, made-up data, and sizes that no \
mesh divides. It is
written for one device. To run it on a mesh of {mesh_text(MESH)}, only the decorator was changed: `jax.jit` \
(or `nnx.jit`)
became the one below, with the mesh and the shardings of batch and parameters. The losses are those of steps
{", ".join(map(str, SHOWN))}, on the mesh and on one device. The bytes are what a device sends in a step, \
by the plan.
`python -m examples.third_party.page` writes this page, and the tests run all of it again.

"""


class Row(NamedTuple):
    sharded: list[float]
    plain: list[float]
    sent: int


def example(name: str) -> Example:
    module: Any = importlib.import_module(f"examples.{name}")
    return module.STEP if isinstance(getattr(module, "STEP", None), TrainStep) else module


def row(name: str) -> Row:
    step, mesh = example(name), make_mesh(MESH)
    return Row(step.train(mesh, STEPS), step.train(None, STEPS), step.plan(mesh).comm_bytes)


def line(name: str, found: Row) -> str:
    what, source, decorator = ROWS[name]
    file = f"examples/{name.replace('.', '/')}.py"
    return (
        f"| [{what}]({source}) | `{file}` | `{decorator}` | {_shown(found.sharded)} | {_shown(found.plain)} "
        f"| {found.sent:,} |"
    )


def _shown(losses: list[float]) -> str:
    return " ".join(f"{losses[i]:.5g}" for i in SHOWN)


def text() -> str:
    """The page; what stands below its table was written by hand."""
    _, _, below = PAGE.read_text().partition(BELOW)
    titles = "after", "here", "decorator", f"losses, {mesh_text(MESH)}", "losses, one device", "bytes sent"
    lines = [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(line(name, row(name)) for name in ROWS),
    ]
    return HEAD + "\n".join(lines) + f"\n\nJAX {jax.__version__}.\n\n" + BELOW + below


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"wrote {PAGE.name}")

"""What holds of any train step: where its operations may be split over more axes, it takes no longer.

The more is on offer, the more ways are left out of the lists that the search chooses from, so that this is a
property of the lists, and of the search that must find what fewer ways led to.

python -m tests.test_offers 60            as many steps of random decoders, of seeds 0, 1, ...; prints those that take longer
python -m tests.test_offers 1 --seed 17   that of one seed
"""

import argparse
import random
import warnings
from collections.abc import Iterator, Sequence

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.partition.decisions import Decisions
from tests.test_pipeline_random import random_decoder

MESHES = (
    {"data": 2, "model": 3},
    {"data": 4, "model": 2},
    {"data": 6, "model": 2},
    {"fsdp": 8},
    {"data": 3, "fsdp": 5},
    {"data": 2, "fsdp": 2, "model": 2},
)
CHIPS = (None, None, "slow", "v4", "v5e", "v6e", "H100")
OFFERS = (True, "near", False)  # from the most to the least
LITTLE = 1.001  # times as long
FEW, MOST = 0.05, 1.1  # the share of steps that take longer than that yet, and how many times as long


def is_shape(x) -> bool:
    return isinstance(x, tuple)


def choices(seed: int, offers: Sequence[bool | str] = OFFERS) -> list[Decisions]:
    """Of the train step of a random decoder, uneven sizes among them, under random specs, for each offer."""
    rng, decoder = random.Random(seed * 7919 + 13), random_decoder(seed)
    chip, sizes, times = rng.choice(CHIPS), rng.choice(MESHES), rng.choice([1, 1, 8])

    def spec(shape: tuple[int, ...]) -> P:
        dims: list[str | None] = [None] * len(shape)
        for axis in sizes:
            at = rng.randrange(len(shape))
            if dims[at] is None and rng.random() < 0.6:
                dims[at] = axis
        return P(*dims)

    def step(params, text_BS):
        loss, grads = jax.value_and_grad(decoder.loss)(params, text_BS)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), decoder.shapes(), is_leaf=is_shape)
    specs = jax.tree.map(spec, decoder.shapes(), is_leaf=is_shape)
    text = jax.ShapeDtypeStruct((decoder.rows * times, decoder.seq + 1), "int32")
    found = []
    for offer in offers:
        options = sx.Options(chip=chip, idle_axes=offer)
        jitted = sx.shard_jit(step, mesh=mesh, in_shardings=(specs, P(next(iter(sizes)))), options=options)
        found.append(jitted.plan(params, text).decisions)
    return found


def longer(seeds: Sequence[int]) -> Iterator[float]:
    """How many times as long those take that take longer."""
    for seed in seeds:
        most, near, least = [found.price for found in choices(seed)]
        ratio = max(most / min(near, least), near / least)
        if ratio > LITTLE:
            print(f"seed {seed}: {most / 1e6:.3f} us, near {near / 1e6:.3f}, as suggested {least / 1e6:.3f}")
            yield ratio


@pytest.mark.quick
@pytest.mark.parametrize("seed", [0, 16, 54, 56, 113, 136])  # all but the first took up to 14 % longer
def test_more_on_offer_takes_no_longer(seed):
    assert not list(longer([seed]))


@pytest.mark.quick
@pytest.mark.parametrize("seed, offer", [(113, False), (138, "near")])
def test_what_messages_leave_open_is_found(seed, offer):
    """These ended 22 and 19 % above the bound. The first is found among the ways near the bound, the second in
    tables in which two copies with a thousand states have no room, but those that messages leave have.
    """
    (found,) = choices(seed, [offer])
    assert found.gap <= (LITTLE - 1) * found.price


@pytest.mark.slow
def test_few_steps_take_longer():
    found = list(longer(range(100, 140)))
    assert len(found) <= FEW * 40 and max(found, default=1.0) < MOST


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="the first (default: 0)")
    args = parser.parse_args()
    found = list(longer(range(args.seed, args.seed + args.count)))
    print(f"{len(found)} of {args.count} take longer")
    return int(bool(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main())

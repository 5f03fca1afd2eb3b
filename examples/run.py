"""What every example does when it is run: trains on 8 devices, prints the losses, and those of one device beside them."""

from collections.abc import Callable, Sequence

from models.devices import make_mesh, mesh_text

MESH = {"data": 2, "model": 4}
Train = Callable[..., Sequence[float]]  # (mesh, or None for one device under plain jax.jit; steps) -> losses


def main(train: Train, steps: int = 20) -> None:
    mesh = make_mesh(MESH)
    sharded, plain = train(mesh, steps), train(None, steps)
    print(f"step   {mesh_text(MESH)}   one device")
    for step, pair in enumerate(zip(sharded, plain, strict=True)):
        print(f"{step:4}   {pair[0]:14.6f}   {pair[1]:10.6f}")

"""State: which arguments of a program come back."""

from collections.abc import Collection, Hashable, Sequence


def state(
    arguments: Sequence[tuple[tuple[int, ...], Hashable]],
    results: Collection[tuple[tuple[int, ...], Hashable]],
    succeeded: Collection[int],
) -> set[int]:
    """The numbers of the arguments that come back, updated or as gradients: a result has their type.

    Where few come back, as activations do that pass through a layer, they are no state, unless they are
    donated and `succeeded` by a result. Scalars are none.

    >>> sorted(state([((8, 4), "float32"), ((2,), "int32")], {((8, 4), "float32")}, ()))
    [0]
    """
    arrays = [i for i, (shape, _) in enumerate(arguments) if shape]
    alike = {i for i in arrays if arguments[i] in results}
    return alike if 2 * len(alike) >= len(arrays) else set(succeeded)

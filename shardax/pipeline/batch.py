"""Which arrays have rows of the batch."""

from collections.abc import Sequence
from typing import Any

from shardax.validation import require_argument_names


def of_batch(
    names: Sequence[str],
    types: Sequence[Any],
    is_free: Sequence[bool],
    given: Any,
    what: str,
    least: int = 1,
) -> list[bool]:
    """Of each array whether its first dim is that of the batch.

    Args:
      names: of the arguments that the arrays are, or are in. `types`: with shapes.
      is_free: which may be the batch where nobody says: the first of them, and those with as many rows.
      given: names of arguments, all of whose arrays are, scalars excepted; None: nobody says.
      what: the function or transform that was given them.
      least: rows that a batch has, where nobody says: one for each microbatch.

    Raises ValueError for a name that no argument has, and for arrays of different numbers of rows.

    >>> import jax
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((8,), "float32")
    >>> of_batch(["x", "w"], [x, w], [True, True], None, "the loss")
    [True, True]
    >>> of_batch(["x", "w"], [x, w], [True, True], "x", "the loss")
    [True, False]
    """
    if given is None:
        sizes = [x.shape[0] if ok and x.shape else 0 for x, ok in zip(types, is_free, strict=True)]
        first = next((n for n in sizes if n >= least), next(filter(None, sizes), None))
        return [n == first for n in sizes]
    given = (given,) if isinstance(given, str) else tuple(given)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"batch_argnames of {what} has {unknown[0]!r}; expected names of arguments, of which there are "
            f"{', '.join(dict.fromkeys(names))}"
        )
    found = [name in given and bool(x.shape) for name, x in zip(names, types, strict=True)]
    if several := _several(names, types, found):
        raise ValueError(
            f"batch_argnames of {what} is {given}, whose arrays have {several} rows; expected one number of "
            "rows: leave out what is no batch"
        )
    return found


def check_one_batch(names: Sequence[str], types: Sequence[Any], what: str, least: int) -> None:
    """Raises ValueError where arrays of `least` rows or more have different numbers of them, so that it is a
    guess which are the batch.
    """
    if several := _several(names, types, [bool(x.shape) and x.shape[0] >= least for x in types]):
        raise ValueError(
            f"{what} is called with arrays of {several} rows that are no parameters, and what is cut into "
            "microbatches would be a guess; say by batch_argnames= which arguments have a row for each row "
            "of the batch"
        )


def check_names(given: Any, what: str) -> None:
    """Raises ValueError unless it is a name, several, or None."""
    require_argument_names(given, f"batch_argnames of {what}")


def _several(names: Sequence[str], types: Sequence[Any], among: Sequence[bool]) -> str:
    """The numbers of rows of the arrays among these, each with a name; empty where all have one."""
    rows: dict[int, str] = {}
    for name, x, counts in zip(names, types, among, strict=True):
        if counts:
            rows.setdefault(x.shape[0], name)
    return " and ".join(f"{count} ({name})" for count, name in rows.items()) if len(rows) > 1 else ""

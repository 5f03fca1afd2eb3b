"""Which items of a program make alike blocks, by their kinds and by what they read."""

import numpy as np
import pytest

from shardax.completion.repeats import REST, groups
from shardax.graph.graph import Value

pytestmark = pytest.mark.quick


def value() -> Value:
    return Value(np.empty(8, "float32"))


def number() -> Value:
    return Value(np.empty((), "float32"))


def blocks(kinds, values=None, arguments=()) -> str:
    """The block of each item as a letter; . is no block."""
    values = values or [[] for _ in kinds]
    tensors = [[v for v in some if v.shape] for some in values]
    found = groups(kinds, tensors, values, set(arguments))
    return "".join("." if block == REST else chr(ord("a") + block) for block in found)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("012301230123", "aaaabbbbcccc"),
        ("xy012301230123z", "..aaaabbbbcccc."),
        ("01230123", "........"),  # twice is not worth it
        ("000000000000", "aaaabbbbcccc"),  # a block has four items at least
        ("010101010101", "aaaabbbbcccc"),
        ("0123456789", ".........."),
        ("01230123012", "..........."),  # the third is cut off
        ("0123012301230", "aaaabbbbcccc."),
        ("", ""),
    ],
)
def test_the_repetition_is_cut_into_blocks(kinds, expected):
    assert blocks([ord(kind) for kind in kinds]) == expected


def test_a_loop_counts_as_what_is_in_it():
    wide = [[value() for _ in range(12)] for _ in range(3)]
    assert blocks([1, 1, 1], wide) == "abc"


def layers(count: int):
    """A forward pass of so many layers of four items, and a backward pass that reads what each layer made."""
    weights, x = [value() for _ in range(count)], value()
    tensors, made = [], []
    for weight in weights:
        made.append([value() for _ in range(4)])
        for before, after in zip([x, *made[-1]], made[-1], strict=False):
            tensors.append([before, weight, after])
        x = made[-1][-1]
    return weights, tensors, made


def test_the_backward_pass_of_a_layer_belongs_to_it():
    weights, tensors, made = layers(3)
    kinds = [0, 1, 2, 3] * 3 + [8, 9]
    tensors += [[made[2][1], value()], [made[0][2], value()]]
    assert blocks(kinds, tensors, weights) == "aaaabbbbccccca"


def test_the_cast_of_a_weight_belongs_to_the_layer_that_uses_it():
    weights, tensors, _ = layers(3)
    cast = value()
    for one in tensors[4:8]:
        one[1] = cast
    assert blocks([7] + [0, 1, 2, 3] * 3, [[weights[1], cast], *tensors], weights) == "baaaabbbbcccc"


def test_what_several_layers_use_belongs_to_none():
    weights, tensors, _ = layers(3)
    cast = value()
    for one in tensors:
        one[1] = cast
    assert blocks([7] + [0, 1, 2, 3] * 3, [[weights[1], cast], *tensors], weights) == ".aaaabbbbcccc"


def test_what_stands_between_items_of_one_block_joins_it():
    weights, tensors, made = layers(3)
    kinds = [0, 1, 2, 3] * 3 + [8, 9, 8]
    tensors += [[made[1][1], value()], [value()], [made[1][2], value()]]
    assert blocks(kinds, tensors, weights) == "aaaabbbbccccbbb"


def test_what_is_added_to_a_running_number_belongs_to_the_layer_that_it_is_of():
    """As the squares of its weights, to the norm of all: whatever the order of the layers."""
    weights, values, made = layers(3)
    squares, sums = [number() for _ in range(4)], [number() for _ in range(5)]
    kinds = [0, 1, 2, 3] * 3 + [8, 8, 8, 8] + [9, 9, 9, 9]
    other = value()
    values += [
        [of, square] for of, square in zip([made[1][0], made[0][0], made[2][0], other], squares, strict=True)
    ]
    values += [[sums[i], square, sums[i + 1]] for i, square in enumerate(squares)]
    assert blocks(kinds, values, [*weights, other]) == "aaaabbbbccccbac..ac."


def test_a_number_that_several_layers_give_belongs_to_none():
    weights, values, made = layers(3)
    first, second, third = number(), number(), number()
    values += [[made[1][0], first], [made[0][0], second], [first, second, third], [third, number()]]
    assert blocks([0, 1, 2, 3] * 3 + [8, 8, 9, 7], values, weights) == "aaaabbbbccccba.."


def test_a_row_of_annotations_does_not_make_the_blocks():
    """They repeat themselves before the layers do, and all layers read what the first gives on."""
    weights, values, _ = layers(6)
    annotated = {weight: value() for weight in weights}
    state = [value() for _ in weights]  # annotated too, by turns
    row = [pair for w, s in zip(weights, state, strict=True) for pair in ([w, annotated[w]], [s, value()])]
    values = [[before, annotated[weight], after] for before, weight, after in values]
    found = blocks([7] * 12 + [0, 1, 2, 3] * 6, row + values, [*weights, *state])
    assert found == "a.b.c.d.e.f." + "aaaabbbbccccddddeeeeffff"

"""Bad input: each message names the argument, the shapes and shardings at hand, and the way out."""

import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
ELSEWHERE = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:4])
NEARBY = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
W = np.ones((8, 4), np.float32)


def identity(state, batch=None):
    return state


def message(call, *args, **kwargs) -> str:
    """The text of the ValueError that the call raises; its traceback shows none of our frames."""
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not [f.filename for f in frames if "/shardax/" in f.filename or "/jax/" in f.filename]
    assert caught.value.__cause__ is None or caught.value.__suppress_context__
    return str(caught.value)


@pytest.mark.parametrize("specs", [P("z"), (P("z"),), ({"w": P("z")},)])
def test_axis_that_the_mesh_lacks(specs):
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=specs), {"w": W})
    assert text == (
        "argument state['w'] of shape (8, 4) is given P('z'), but the mesh (x=4, y=2) has no axis 'z': "
        "name one of its axes, or give a mesh with it"
    )


def test_axis_used_twice():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=P("x", ("y", "x"))), W)
    assert text == (
        "argument state of shape (8, 4) is given P('x', ('y', 'x')), which uses axis 'x' twice, for dims 0 "
        "and 1: an axis splits at most one dim, drop one of its uses"
    )


def test_spec_longer_than_the_rank():
    text = message(
        sx.shard_jit(identity, mesh=MESH, in_shardings=(None, P("x", None, "y"))), W, {"tokens": W}
    )
    assert text == (
        "argument batch['tokens'] of shape (8, 4) is given P('x', None, 'y'), with 3 entries for 2 dims: "
        "drop the entries past the array's rank"
    )


def test_spec_tree_that_does_not_fit():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=({"v": P("x")},)), {"w": W})
    assert text.startswith(
        "the tree in_shardings is no prefix of the tuple of positional arguments that are not static: "
        "give one sharding for a whole subtree, or the same keys."
    )
    assert "in_shardings[0]" in text and "('v',)" in text and "('w',)" in text


def test_none_is_a_leaf_of_a_spec_tree_that_does_not_fit():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=(None, {"v": P("x")})), {"w": W}, {"w": W})
    assert "in_shardings[1]" in text and "in_shardings[0]" not in text and "NoneType" not in text


@pytest.mark.parametrize("kwargs, given", [({}, "state"), ({"other": W}, "state, other=")])
def test_too_many_specs(kwargs, given):
    f = sx.shard_jit(lambda state, batch=None, **other: state, mesh=MESH, in_shardings=(P("x"), P("y")))
    assert message(f, W, **kwargs) == (
        "in_shardings is a tuple of 2 entries, but the arguments of this call that are not static are "
        f"({given}): give one for each positional argument, None where it is left open, or one sharding for "
        "all of them, not in a tuple"
    )


def test_too_few_specs():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=(P("x"),)), W, W)
    assert "a tuple of 1 entry" in text and "are (state, batch): give" in text


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"mesh": (4, 2)},
            "mesh=(4, 2) of shard_jit is no mesh: give one, such as jax.make_mesh((4, 2), ('data', 'model'))",
        ),
        (
            {"options": {"strict": True}},
            "options={'strict': True} of shard_jit: must be shardax.Options, such as ",
        ),
        ({"transforms": identity}, " of shard_jit: must be a tuple of functions of a jaxpr"),
        ({"fun": MESH}, ", not a function: give shardings and the mesh by their names"),
    ],
)
def test_what_shard_jit_is_given(given, words):
    assert words in message(sx.shard_jit, **{"fun": identity, **given})


def test_no_sharding():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=("x",)), W)
    assert text == "argument state: 'x' is no sharding; give a PartitionSpec, a NamedSharding or None"


def test_named_sharding_on_other_devices():
    text = message(sx.shard_jit(identity, mesh=MESH, in_shardings=NamedSharding(ELSEWHERE, P("x"))), W)
    assert text == (
        "argument state is given a NamedSharding on the mesh (x=2) of devices [2, 3], but the program's "
        "mesh, named by mesh= of shard_jit, is (x=4, y=2) of devices [0, 1, 2, 3, 4, 5, 6, 7]: give its "
        "spec P('x') alone, or build it on the program's mesh"
    )


@pytest.mark.parametrize("annotate", [sx.annotate, jax.lax.with_sharding_constraint])
@pytest.mark.parametrize("program", [MESH, NEARBY], ids=["more", "as many"])
def test_annotation_on_other_devices(annotate, program):
    """Inside, with its line; and who named the program's mesh."""
    f = sx.shard_jit(
        lambda x: annotate(x, NamedSharding(ELSEWHERE, P("x"))), in_shardings=NamedSharding(program, P("x"))
    )
    text = message(f, W)
    assert re.search(
        r" at .*tests/test_errors.py:\d+ asks for a sharding on the mesh \(x=2\) of devices \[2, 3\], but",
        text,
    )
    assert re.search(
        r"mesh, named by in_shardings of shard_jit, is \(.*\) of devices \[0, 1.*\]: give its spec P\('x'(, None)?\) alone",
        text,
    )


def test_no_mesh():
    text = message(sx.shard_jit(identity), W)
    assert text == (
        "shard_jit(identity) has no mesh to run on: give it mesh=, call it under jax.set_mesh(mesh), "
        "or pass it arguments that lie on a mesh (NamedSharding)"
    )
    assert message(sx.shard_jit(identity).lower, W) == message(sx.shard_jit(identity).plan, W) == text


def test_inside_shard_map():
    inner = sx.shard_jit(identity, mesh=MESH)
    text = message(jax.jit(jax.shard_map(inner, mesh=MESH, in_specs=P("x"), out_specs=P("x"))), W)
    assert text == (
        "shard_jit(identity) is called inside a shard_map over x, y, which its mesh (x=4, y=2) has too: "
        "what it would split is split already; call it outside of the shard_map, or call the function itself"
    )


def test_committed_on_other_devices():
    x = jax.device_put(W, NamedSharding(ELSEWHERE, P("x")))
    text = message(sx.shard_jit(identity, mesh=MESH), {"w": x})
    assert text.startswith(
        "argument state['w'] of shape (8, 4) is committed to NamedSharding(mesh=Mesh('x': 2"
    )
    assert text.endswith(
        " on devices [2, 3], but the mesh (x=4, y=2) has the devices [0, 1, 2, 3, 4, 5, 6, 7]: "
        "move it there with jax.device_put, or pass it as a numpy array"
    )


def test_committed_on_one_device():
    x = jax.device_put(W, jax.devices()[3])
    text = message(sx.shard_jit(lambda state, batch: state + batch[0], mesh=MESH), W, [x])
    assert text.startswith("argument batch[0] of shape (8, 4) is committed to SingleDeviceSharding")


@pytest.mark.parametrize("donate", [0, (0, 1)])
def test_donated_twice(donate):
    x = jax.device_put(W, NamedSharding(MESH, P("x")))
    jitted = sx.shard_jit(
        lambda state, batch: (state["w"] + 1, batch["w"] * 2), mesh=MESH, donate_argnums=donate
    )
    assert message(jitted, {"w": x}, {"w": x}) == (
        "argument state['w'] of shape (8, 4) is donated, and the same array is passed as argument "
        "batch['w'] too: pass a copy (jax.numpy.copy), or do not donate it"
    )


def test_donated_before():
    """The words are ours where JAX would crash."""
    state = {"w": jax.device_put(W, NamedSharding(MESH, P("x")))}
    jitted = sx.shard_jit(lambda state: {"w": state["w"] + 1}, mesh=MESH, donate_argnums=0)
    jitted(state)
    with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[8,4\]") as caught:
        jitted(state)
    assert (
        not _jax.DONATED_AGAIN_CRASHES
        or "It is argument state['w'], and was donated to a call before" in str(caught.value)
    )


def test_static_that_cannot_be_hashed():
    jitted = sx.shard_jit(lambda x, sizes: x * sizes[0], mesh=MESH, static_argnames="sizes")
    text = (
        "static argument sizes is [2], of type list, which cannot be hashed: "
        "give a hashable one (a tuple, a frozen dataclass), or do not make it static"
    )
    assert message(jitted, W, [2]) == message(jitted, W, sizes=[2]) == text


def test_output_tree_that_does_not_fit():
    text = message(sx.shard_jit(lambda x: {"loss": x}, mesh=MESH, out_shardings={"los": P()}), W)
    assert "out_shardings" in text and "('los',)" in text and "('loss',)" in text


def test_output_spec_longer_than_the_rank():
    text = message(sx.shard_jit(lambda x: {"loss": x.sum()}, mesh=MESH, out_shardings=P("x")), W)
    assert text == (
        "result['loss'] of shape () is given P('x'), with 1 entries for 0 dims: drop the entries past the "
        "array's rank"
    )


def test_annotate():
    text = message(sx.shard_jit(lambda x: sx.annotate({"a": x}, P("z")), mesh=MESH), W)
    assert re.fullmatch(
        r"annotate's \['a'\] at .*test_errors.py:\d+ of shape \(8, 4\) is given P\('z'\), but the mesh \(x=4, y=2\) "
        "has no axis 'z': name one of its axes, or give a mesh with it",
        text,
    )
    assert message(sx.annotate, W, P("x")) == (
        "annotate's value: there is no mesh to place it on; enter one with jax.set_mesh, or give a "
        "NamedSharding"
    )


def test_symbolic_sizes():
    """Only of shapes does a function of symbolic sizes say something."""
    (b,) = export.symbolic_shape("b")
    shapes = {"w": jax.ShapeDtypeStruct((b, 4), "float32")}, None
    f = sx.shard_jit(identity, mesh=MESH, in_shardings=P(None, "x"))
    why = (
        " of shape (b, 4) has the symbolic size b (jax.export), but which splits a program takes depends "
        "on its sizes: export it for each size that you need, or pad to the next of a few"
    )
    for stage in (f.plan, f.lower, f.trace):
        assert message(stage, *shapes) == "argument state['w'] of shard_jit(identity)" + why
    for jitted, what in (
        (f, "argument state['w'] of"),
        (jax.jit(lambda *args: f(*args)), "argument 0 of a shard_jit inside"),
    ):
        with pytest.raises(ValueError, match=re.escape(what)):
            export.export(jitted)(*shapes)
    assert f.eval_shape(*shapes)["w"].shape == (b, 4)


class TestRefs:
    """Mutable arrays of the caller's."""

    words = " a Ref of shape (8, 4), which shard_jit does not write to: "

    def test_result(self):
        f = sx.shard_jit(lambda state: state, mesh=MESH)
        ref = jax.new_ref(jax.device_put(W, NamedSharding(MESH, P("x"))))
        assert message(f, {"w": ref}) == f"result['w'] is{self.words}return what it holds, ref[...]"

    def test_elsewhere(self):
        """A Ref is committed to its devices."""
        text = message(sx.shard_jit(lambda ref: ref[0], mesh=MESH), jax.new_ref(jnp.asarray(W)))
        assert text.startswith("argument ref of shape (8, 4) is committed to SingleDeviceSharding")
        assert text.endswith(": make it of an array that lies there with jax.device_put")

    def test_closed_over(self):
        ref = jax.new_ref(jnp.asarray(W))

        def step(x):
            ref[0] = x

        assert f"step closes over{self.words}pass it as an argument" == message(
            sx.shard_jit(step, mesh=MESH), W[0]
        )


class TestOwnErrors:
    """What the user's function raises is raised as it is, with the user's frames alone."""

    def fails(self, x):
        raise KeyError("mine")

    @pytest.mark.parametrize("mesh", [MESH, jax.make_mesh((4, 2), ("x", "y"))], ids=["auto", "explicit"])
    def test_call(self, mesh):
        with pytest.raises(KeyError, match="mine") as caught:
            sx.shard_jit(lambda x: self.fails(x), mesh=mesh)(W)
        assert self.names(caught) == ["test_call", "<lambda>", "fails"]

    def test_lower(self):
        with pytest.raises(KeyError, match="mine") as caught:
            sx.shard_jit(self.fails, mesh=MESH).lower(W)
        assert self.names(caught) == ["test_lower", "fails"]

    def test_as_jit_shows_it(self):
        f = lambda x: jnp.dot(x, x)  # noqa: E731
        with pytest.raises(TypeError, match="dot_general") as caught:
            sx.shard_jit(f, mesh=MESH)(W)
        with pytest.raises(TypeError, match="dot_general") as expected:
            jax.jit(f)(W)
        assert self.names(caught) == self.names(expected)

    @pytest.mark.parametrize("mesh", [MESH, jax.make_mesh((4, 2), ("x", "y"))], ids=["auto", "explicit"])
    @pytest.mark.parametrize(
        "fun, args, kwargs, name",
        [
            (lambda n, state: bool(state["w"][1].sum()), (2, {"v": W, "w": [W, W]}), {}, "state['w'][1]"),
            (lambda n, x, *rest: bool(rest[0].sum()), (2, W, W), {}, "argument_1"),
            (lambda n, x, **more: bool(more["lr"].sum()), (2, W), {"lambda": 1.0, "lr": W}, "lr"),
        ],
    )
    def test_jax_names_the_function_and_the_argument(self, mesh, fun, args, kwargs, name):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            sx.shard_jit(fun, mesh=mesh, static_argnums=0)(*args, **kwargs)
        assert f"depends on the value of the argument {name}." in str(caught.value)
        assert "the function <lambda> at " in str(caught.value) and "test_errors.py" in str(caught.value)

    def test_inside_jit(self):
        with pytest.raises(KeyError, match="mine") as caught:
            jax.jit(sx.shard_jit(self.fails, mesh=MESH))(W)
        assert self.names(caught) == ["test_inside_jit", "fails"]

    def names(self, caught) -> list[str]:
        return [f.name for f in traceback.extract_tb(caught.value.__traceback__)]

"""Bad input: each message names the argument, the shapes and shardings at hand, and the way out."""

import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax

MESHES = {
    kind: jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    for kind, types in {
        "auto": (AxisType.Auto, AxisType.Auto),
        "explicit": (AxisType.Explicit, AxisType.Explicit),
        "mixed": (AxisType.Explicit, AxisType.Auto),
    }.items()
}
MESH = MESHES["auto"]
ELSEWHERE = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:4])
NEARBY = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
STRIDED = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
W = np.ones((8, 4), np.float32)


@pytest.fixture(params=MESHES.values(), ids=MESHES)
def mesh(request):
    return request.param


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
def test_axis_that_the_mesh_lacks(mesh, specs):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=specs), {"w": W})
    assert text == (
        "argument state['w'] of shape (8, 4) is given P('z'), but the mesh (x=4, y=2) has no axis 'z': "
        "name one of its axes, or give a mesh with it"
    )


def test_axis_used_twice(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=P("x", ("y", "x"))), W)
    assert text == (
        "argument state of shape (8, 4) is given P('x', ('y', 'x')), which uses axis 'x' twice, for dims 0 "
        "and 1: an axis splits at most one dim, drop one of its uses"
    )


def test_spec_longer_than_the_rank(mesh):
    text = message(
        sx.shard_jit(identity, mesh=mesh, in_shardings=(None, P("x", None, "y"))), W, {"tokens": W}
    )
    assert text == (
        "argument batch['tokens'] of shape (8, 4) is given P('x', None, 'y'), with 3 entries for 2 dims: "
        "drop the entries past the array's rank"
    )


def test_spec_tree_that_does_not_fit(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=({"v": P("x")},)), {"w": W})
    assert text.startswith(
        "the tree in_shardings is no prefix of the tuple of positional arguments that are not static: "
        "give one sharding for a whole subtree, or the same keys."
    )
    assert "in_shardings[0]" in text and "('v',)" in text and "('w',)" in text


def test_none_is_a_leaf_of_a_spec_tree_that_does_not_fit(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=(None, {"v": P("x")})), {"w": W}, {"w": W})
    assert "in_shardings[1]" in text and "in_shardings[0]" not in text and "NoneType" not in text


@pytest.mark.parametrize("kwargs, given", [({}, "state"), ({"other": W}, "state, other=")])
def test_too_many_specs(mesh, kwargs, given):
    f = sx.shard_jit(lambda state, batch=None, **other: state, mesh=mesh, in_shardings=(P("x"), P("y")))
    assert message(f, W, **kwargs) == (
        "in_shardings is a tuple of 2 entries, but the arguments of this call that are not static are "
        f"({given}): give one for each positional argument, None where it is left open, or one sharding for "
        "all of them, not in a tuple"
    )


@pytest.mark.parametrize(
    "spec, kind, right",
    [(("x", "y"), "tuple", "P('x', 'y')"), ([("x", "y"), None], "list", "P(('x', 'y'), None)")],
)
def test_plain_names_for_a_spec(mesh, spec, kind, right):
    words = f"{spec!r}, a plain {kind}, which is no sharding: give {right}"
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=(None, {"w": spec})), W, {"w": W})
    assert text == f"argument batch['w'] of shape (8, 4) is given, in in_shardings, {words}"
    text = message(sx.shard_jit(lambda state: state, mesh=mesh, in_shardings=spec), W)
    assert text == (f"in_shardings is {words} for all arguments (state), or a tuple with a sharding for each")
    text = message(sx.shard_jit(lambda state: {"w": state}, mesh=mesh, out_shardings={"w": spec}), W)
    assert text == f"out_shardings['w'], for a value of shape (8, 4), is {words}"


def test_too_few_specs(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=(P("x"),)), W, W)
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
        (
            {"transforms": [sx.zero.Zero]},
            "must be a tuple of functions of a jaxpr, such as (shardax.zero.Zero('data'),)",
        ),
        ({"fun": MESH}, ", not a function: give shardings and the mesh by their names"),
    ],
)
def test_what_shard_jit_is_given(given, words):
    assert words in message(sx.shard_jit, **{"fun": identity, **given})


def test_no_sharding(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=("x",)), W)
    assert text == "argument state: 'x' is no sharding; give a PartitionSpec, a NamedSharding or None"


def test_named_sharding_on_other_devices(mesh):
    text = message(sx.shard_jit(identity, mesh=mesh, in_shardings=NamedSharding(ELSEWHERE, P("x"))), W)
    assert text == (
        "Received incompatible devices for jitted computation. That is, "
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


NO_MESH = (
    "shard_jit(identity) has no mesh to run on: give it mesh=, call it under jax.set_mesh(mesh), "
    "or pass it arguments that are placed on a mesh (NamedSharding)"
)


@pytest.mark.parametrize(
    "given", [{"in_shardings": P("x")}, {"out_shardings": P("x")}, {"transforms": [len]}]
)
def test_no_mesh(given):
    f = sx.shard_jit(identity, **given)
    assert message(f, W) == message(f.lower, W) == message(f.plan, W) == NO_MESH


def test_no_mesh_to_plan_for():
    assert message(sx.shard_jit(identity).plan, W) == NO_MESH


def test_no_mesh_where_the_devices_come_to_light_late():
    """Arguments that are traced have a mesh in their types; what is made inside has none."""
    f, x = sx.shard_jit(lambda x: jnp.sin(x).sum()), jax.device_put(W, NamedSharding(MESH, P("x")))
    for around in (jax.jit, jax.grad, lambda f: jax.vmap(f, in_axes=1)):
        np.testing.assert_allclose(around(f)(x), around(lambda x: jnp.sin(x).sum())(W), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError) as caught:
        jax.jit(lambda x: f(jnp.ones(3)) + x.sum())(x)
    assert str(caught.value) == (
        "shard_jit(<lambda>) was traced where it found no mesh, so as jax.jit(fun) for one device, and now it "
        "is to run on 8 devices: give it mesh=, or call what is around it under jax.set_mesh(mesh)"
    )


@pytest.mark.parametrize("given", [{"device": jax.devices()[1]}, {"backend": "cpu"}])
def test_devices_of_jit(given):
    ((name, value),) = given.items()
    assert message(sx.shard_jit, identity, **given) == (
        f"{name}={value!r} of shard_jit: the mesh says which devices run: give mesh=, or, without a mesh, place "
        "the arguments there (jax.device_put, jax.default_device)"
    )


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_leaves_of_jit_that_do_not_fit(mesh, side):
    what = "argument state" if side == "in_shardings" else "result"
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert message(sx.shard_jit(identity, mesh=mesh, **{side: one}), W) == (
        "Received incompatible devices for jitted computation. That is, "
        f"{what} of shape (8, 4) is given {one} on devices [3], but the mesh (x=4, y=2) is of devices "
        "[0, 1, 2, 3, 4, 5, 6, 7]: give a PartitionSpec, P() for all of it on every device"
    )
    layout = Layout((1, 0))
    format = Format(layout, NamedSharding(mesh, P("x")))
    assert message(sx.shard_jit(identity, mesh=mesh, **{side: format}), W) == (
        f"{what} of shape (8, 4) is given a Format with the layout {layout}, and shard_jit leaves layouts "
        "to XLA: give the Format's sharding, and bring arrays into a layout with jax.device_put outside"
    )
    ordered, strided = jax.devices(), NamedSharding(STRIDED, P("b"))
    for devices, like in ((ordered[::-1], NamedSharding(mesh, P("x"))), (ordered, strided)):
        tiles = _jax.gspmd_sharding(devices, like, 2)
        assert message(sx.shard_jit(identity, mesh=mesh, **{side: tiles}), W) == (
            f"{what} of shape (8, 4) is given {tiles}, which is not split over whole axes of the mesh "
            "(x=4, y=2) in the order of its devices: give a NamedSharding"
        )


def test_inside_shard_map(mesh):
    inner = sx.shard_jit(identity, mesh=mesh)
    x = jax.device_put(W, NamedSharding(mesh, P("x")))
    text = message(jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=P("x"), out_specs=P("x"))), x)
    assert text == (
        "shard_jit(identity) is called inside a shard_map over x, y, which its mesh (x=4, y=2) has too: "
        "what it would split is split already; call it outside of the shard_map, or call the function itself"
    )


def test_committed_on_other_devices(mesh):
    x = jax.device_put(W, NamedSharding(ELSEWHERE, P("x")))
    text = message(sx.shard_jit(identity, mesh=mesh), {"w": x})
    assert text.startswith(  # as jax.jit says it
        "Received incompatible devices for jitted computation. Got argument state['w'] of identity with shape "
        "float32[8,4] and with device ids [2, 3] on platform CPU and "
    )
    assert (
        ". That is, argument state['w'] of shape (8, 4) is committed to NamedSharding(mesh=Mesh('x': 2"
        in text
    )
    assert text.endswith(
        " on devices [2, 3], but the mesh (x=4, y=2) has the devices [0, 1, 2, 3, 4, 5, 6, 7]: "
        "move it there with jax.device_put, or pass it as a numpy array"
    )


def test_committed_on_one_device(mesh):
    x = jax.device_put(W, jax.devices()[3])
    text = message(sx.shard_jit(lambda state, batch: state + batch[0], mesh=mesh), W, [x])
    assert ". That is, argument batch[0] of shape (8, 4) is committed to SingleDeviceSharding" in text


@pytest.mark.parametrize("donate", [0, (0, 1)])
def test_donated_twice(mesh, donate):
    x = jax.device_put(W, NamedSharding(mesh, P("x")))
    jitted = sx.shard_jit(
        lambda state, batch: (state["w"] + 1, batch["w"] * 2), mesh=mesh, donate_argnums=donate
    )
    assert message(jitted, {"w": x}, {"w": x}) == (
        "argument state['w'] of shape (8, 4) is donated, and the same array is passed as argument "
        "batch['w'] too: pass a copy (jax.numpy.copy), or do not donate it"
    )


def test_donated_before(mesh):
    """The words are ours where JAX would crash."""
    state = {"w": jax.device_put(W, NamedSharding(mesh, P("x")))}
    jitted = sx.shard_jit(lambda state: {"w": state["w"] + 1}, mesh=mesh, donate_argnums=0)
    jitted(state)
    with pytest.raises(
        RuntimeError, match=r"Array has been deleted with shape=float32\[8(@x)?,4\]"
    ) as caught:
        jitted(state)
    assert (
        not _jax.DONATED_AGAIN_CRASHES
        or "It is argument state['w'], and was donated to a call before" in str(caught.value)
    )


def test_static_that_cannot_be_hashed(mesh):
    jitted = sx.shard_jit(lambda x, sizes: x * sizes[0], mesh=mesh, static_argnames="sizes")
    text = (
        "static argument sizes is [2], of type list, which cannot be hashed: "
        "give a hashable one (a tuple, a frozen dataclass), or do not make it static"
    )
    assert message(jitted, W, [2]) == message(jitted, W, sizes=[2]) == text


def test_output_tree_that_does_not_fit(mesh):
    text = message(sx.shard_jit(lambda x: {"loss": x}, mesh=mesh, out_shardings={"los": P()}), W)
    assert "out_shardings" in text and "('los',)" in text and "('loss',)" in text


def test_output_spec_longer_than_the_rank(mesh):
    text = message(sx.shard_jit(lambda x: {"loss": x.sum()}, mesh=mesh, out_shardings=P("x")), W)
    assert text == (
        "result['loss'] of shape () is given P('x'), with 1 entries for 0 dims: drop the entries past the "
        "array's rank"
    )


def test_annotate(mesh):
    text = message(sx.shard_jit(lambda x: sx.annotate({"a": x}, P("z")), mesh=mesh), W)
    assert re.fullmatch(
        r"annotate's \['a'\] at .*test_errors.py:\d+ of shape \(8, 4\) is given P\('z'\), but the mesh \(x=4, y=2\) "
        "has no axis 'z': name one of its axes, or give a mesh with it",
        text,
    )
    assert message(sx.annotate, W, P("x")) == (
        "annotate's value: there is no mesh to place it on; enter one with jax.set_mesh, or give a "
        "NamedSharding"
    )


def test_symbolic_sizes(mesh):
    """Only of shapes does a function of symbolic sizes say something."""
    (b,) = export.symbolic_shape("b")
    shapes = {"w": jax.ShapeDtypeStruct((b, 4), "float32")}, None
    f = sx.shard_jit(identity, mesh=mesh, in_shardings=P(None, "x"))
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
    if mesh is MESH:  # the type of a result on Explicit axes is that of the program
        assert f.eval_shape(*shapes)["w"].shape == (b, 4)


class TestRefs:
    """Mutable arrays of the caller's."""

    words = " a Ref of shape (8, 4), which shard_jit does not write to: "

    def test_result(self, mesh):
        f = sx.shard_jit(lambda state: state, mesh=mesh)
        ref = jax.new_ref(jax.device_put(W, NamedSharding(mesh, P("x"))))
        assert message(f, {"w": ref}) == f"result['w'] is{self.words}return what it holds, ref[...]"

    def test_elsewhere(self, mesh):
        """A Ref is committed to its devices."""
        text = message(sx.shard_jit(lambda ref: ref[0], mesh=mesh), jax.new_ref(jnp.asarray(W)))
        assert "That is, argument ref of shape (8, 4) is committed to SingleDeviceSharding" in text
        assert text.endswith(": make it of an array that is placed there with jax.device_put")

    def test_closed_over(self, mesh):
        ref = jax.new_ref(jnp.asarray(W))

        def step(x):
            ref[0] = x

        text = message(sx.shard_jit(step, mesh=mesh), W[0])
        assert text.startswith(
            "Received incompatible devices for jitted computation. That is, "
            "a Ref of shape (8, 4) that step closes over is committed to SingleDeviceSharding"
        )
        assert text.endswith(": make it of an array that is placed there with jax.device_put")


def missing_key(x, w):
    return {"a": x}["b"]


def contraction(x, w):
    return x @ w


def reshaped(x, w):
    return w.reshape(4, 4)


def carry(x, w):
    return jax.lax.scan(lambda c, _: (c[:2], None), w[0], length=3)


def branches(x, w):
    return jax.lax.cond(x.sum() > 0, lambda: x, lambda: w)


def condition(x, w):
    return x if w.sum() > 0 else w


def axis_of_no_mesh(x, w):
    return jax.lax.with_sharding_constraint(x, P("z"))


def spec_of_three(x, w):
    return jax.lax.with_sharding_constraint(x, P(None, None, "y"))


def unbound_axis(x, w):
    return jax.lax.psum(x, "x")


OWN = [
    missing_key,
    contraction,
    reshaped,
    carry,
    branches,
    condition,
    axis_of_no_mesh,
    spec_of_three,
    unbound_axis,
]
"""Raise something under jax.jit too."""


def resharded(x):
    return jax.sharding.reshard(x, P("y"))


def asked_for(x):
    return jnp.einsum("ij->ji", x, out_sharding=P(None, "x"))


def closes_over(x):
    return x + jax.device_put(W, NamedSharding(MESHES["explicit"], P("x")))


def looks_at_types(x):
    assert jax.typeof(x).sharding.spec[0] == "x"
    return x


def island(x):
    return jax.shard_map(lambda x: 2 * x, mesh=MESHES["explicit"], in_specs=P("x"), out_specs=P("x"))(x)


WANTS_TYPES = [resharded, asked_for, closes_over, looks_at_types, island]


def _first_line(caught) -> str:
    """Types in it without their axes."""
    return re.sub(r"@\w+", "", str(caught.value).split("\n")[0])


class TestOwnErrors:
    """What the user's function raises is raised as it is, with the user's frames alone."""

    def fails(self, x):
        raise KeyError("mine")

    def test_call(self, mesh):
        with pytest.raises(KeyError, match="mine") as caught:
            sx.shard_jit(lambda x: self.fails(x), mesh=mesh)(W)
        assert self.names(caught) == ["test_call", "<lambda>", "fails"]

    def test_lower(self, mesh):
        with pytest.raises(KeyError, match="mine") as caught:
            sx.shard_jit(self.fails, mesh=mesh).lower(W)
        assert self.names(caught) == ["test_lower", "fails"]

    def test_as_jit_shows_it(self, mesh):
        f = lambda x: jnp.dot(x, x)  # noqa: E731
        with pytest.raises(TypeError, match="dot_general") as caught:
            sx.shard_jit(f, mesh=mesh)(W)
        with pytest.raises(TypeError, match="dot_general") as expected:
            jax.jit(f)(W)
        assert self.names(caught) == self.names(expected)

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

    def test_inside_jit(self, mesh):
        with pytest.raises(KeyError, match="mine") as caught:
            jax.jit(sx.shard_jit(self.fails, mesh=mesh))(W)
        assert self.names(caught) == ["test_inside_jit", "fails"]

    @pytest.mark.parametrize("fun", OWN, ids=lambda fun: fun.__name__)
    def test_are_raised_once(self, mesh, fun):
        """The function is run once, and no other way of tracing it shows its own error instead."""
        w = np.ones((5, 3), np.float32)  # no axis divides it, which Explicit types refuse
        runs = []

        def counted(x, w):
            runs.append(1)
            return fun(x, w)

        with pytest.raises(Exception) as wanted, jax.set_mesh(mesh):
            jax.jit(fun)(W, w)
        runs.clear()
        for specs in (None, (P("x"), P("y")), P(None, "x")):
            with pytest.raises(type(wanted.value)) as caught, jax.set_mesh(mesh):
                sx.shard_jit(counted, mesh=mesh, in_shardings=specs)(W, w)
            assert _first_line(caught) == _first_line(wanted).replace(" fun ", " counted ")
            assert self.names(caught)[:3] == ["test_are_raised_once", "counted", fun.__name__]
        assert len(runs) == 3

    @pytest.mark.parametrize("wants", WANTS_TYPES, ids=lambda fun: fun.__name__)
    def test_after_what_needs_explicit_types(self, wants):
        """What the function raises after JAX has sent it to another way of tracing is still its own."""
        mesh = MESHES["explicit"]

        def step(x):
            x = wants(x)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine") as caught, jax.set_mesh(mesh):
            sx.shard_jit(step, mesh=mesh, in_shardings=P("x"))(W)
        assert self.names(caught) == ["test_after_what_needs_explicit_types", "step"]
        assert caught.value.__context__ is None

    @pytest.mark.parametrize("wants", WANTS_TYPES, ids=lambda fun: fun.__name__)
    def test_what_needs_explicit_types_runs(self, wants):
        with jax.set_mesh(MESHES["explicit"]):
            x = jax.device_put(W, NamedSharding(MESHES["explicit"], P("x")))
            np.testing.assert_array_equal(sx.shard_jit(wants)(x), jax.jit(wants)(x))

    def names(self, caught) -> list[str]:
        return [f.name for f in traceback.extract_tb(caught.value.__traceback__)]

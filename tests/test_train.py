"""The main job: end to end on a tiny model, its comparisons, its text, its rules of sharding, its errors."""

import platform
import re
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import convnet, gpt2, gpt2_sharding, mlp, report, text
from models.devices import make_mesh
from models.options import parse
from models.steps import State
from models.train import main
from models.trainers import dividing

# flax and optax mix weakly typed floats with integer counts
pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

TINY = ["--size", "tiny", "--batch", "8", "--seq", "32"]


def run(capsys, tmp_path: Path, *argv: str) -> str:
    main([*TINY, "--out", str(tmp_path / "loss.png"), *argv])
    return capsys.readouterr().out


def losses(out: str, name: str) -> list[float]:
    return [float(loss) for loss in re.findall(rf"^{name}: step \d+/\d+  loss ([\d.]+)", out, re.MULTILINE)]


@pytest.mark.once
def test_main_job(capsys, tmp_path):
    out = run(capsys, tmp_path, "--mesh", "data=4,model=2", "--steps", "30", "--rate", "1e-2")
    curve = losses(out, "shardax")
    assert curve[-1] < curve[0] - 0.5
    assert "mesh data=4,model=2" in out
    assert re.search(r"^held-out loss: \d\.\d+ nats a token$", out, re.MULTILINE)
    corpus = text.standard_library()
    assert (
        f"\ncorpus: the Python {platform.python_version()} standard library in {sysconfig.get_path('stdlib')}, "
        in out
    )
    prompt = rf"^sample, after the first 32 tokens of {corpus.first}, of which the last are shown before >>>:\n    .*>>>"
    assert re.search(prompt, out, re.MULTILINE | re.DOTALL)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "plan.html", "plan.txt"]
    brief, _, rest = out.partition("plan of the train step, in brief:\n")[2].partition("the whole plan, with")
    assert f"{tmp_path / 'plan.txt'} and {tmp_path / 'plan.html'}" in rest
    first, *lines = brief.splitlines()
    whole = (tmp_path / "plan.txt").read_text()
    assert whole.startswith(first) and len(whole) > 10 * len(brief)
    dearest = lines[lines.index("", 4) :]
    assert (
        sum(bool(re.match(r"    models/\w+\.py:\d+  .* [KM]?i?B +[\d.]+ %$", line)) for line in dearest) == 10
    )
    shares = [float(re.search(r" ([\d.]+) %$", line)[1]) for line in dearest if line.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.6)  # ten lines, and others in one, if there are any


@pytest.mark.once
def test_held_out_loss_while_it_trains(capsys, tmp_path, monkeypatch):
    """At every eighth of the run, and at its end, which is what is printed; the plot shows it."""
    plotted = []
    monkeypatch.setattr(
        report, "plot_losses", lambda curves, path, held_out: plotted.append((curves, held_out))
    )
    out = run(capsys, tmp_path, "--mesh", "data=8", "--steps", "17", "--rate", "1e-2", "--partitioner", "xla")
    ((curves, held_out),) = plotted
    assert list(held_out) == [2, 4, 6, 8, 10, 12, 14, 16, 17] and len(curves["xla"]) == 17
    assert held_out[17] < held_out[2] - 0.2
    assert f"held-out loss: {held_out[17]:.4f} nats a token" in out
    assert not (tmp_path / "plan.txt").exists()


@pytest.mark.once
@pytest.mark.parametrize(
    "mesh, dropout", [("data=2,fsdp=2,model=2", "0.5"), pytest.param("data=5", "0", marks=pytest.mark.slow)]
)
def test_compare(capsys, tmp_path, mesh, dropout):
    """The same losses; dropout is the same on every mesh."""
    out = run(capsys, tmp_path, "--mesh", mesh, "--steps", "10", "--dropout", dropout, "--compare")
    (difference,) = re.findall(r"largest relative difference of the losses: (\S+)", out)
    assert float(difference) < 1e-4
    assert len(losses(out, "shardax")) == len(losses(out, "one device")) == 10


@pytest.mark.once
def test_xla_says_what_it_drops(capsys, tmp_path):
    out = run(capsys, tmp_path, "--mesh", "data=2,model=4", "--steps", "2", "--partitioner", "xla")
    assert (
        "xla does not split params/embed/embedding float32[257, 32]: P('model', None) becomes P(None, None)"
        in out
    )
    assert "plan" not in out


@pytest.mark.once
def test_state_at_the_host(capsys, tmp_path):
    """The same losses; the held-out loss and the sample read parameters there."""
    argv = "--mesh", "data=8", "--steps", "3", "--zero", "3", "--rate", "1e-2"
    plain = run(capsys, tmp_path, *argv)
    assert "in the host's memory" not in (tmp_path / "plan.txt").read_text()
    found = run(capsys, tmp_path, *argv, "--offload", "both")
    assert "in the host's memory" in (tmp_path / "plan.txt").read_text()
    np.testing.assert_allclose(losses(found, "shardax"), losses(plain, "shardax"), atol=2e-4)
    held_out = [float(re.findall(r"held-out loss: (\d\.\d+)", out)[0]) for out in (plain, found)]
    assert abs(held_out[0] - held_out[1]) <= 2e-4


@pytest.mark.once
def test_speeds(capsys, tmp_path):
    """Of stage 3 of ZeRO beside that by annotation."""
    out = run(capsys, tmp_path, "--steps", "1", "--partitioner", "both", "--zero", "3", "--mesh", "data=8")
    assert "xla: FSDP by annotation, mesh fsdp=8" in out
    assert len(re.findall(r"tokens/s, the median of [\d,]+, [\d,]+, [\d,]+", out)) == 2
    assert re.search(r"^shardax / xla: \d+\.\d+$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--mesh", "date=4"],
            "train: argument --mesh: 'date=4' is not of the form axis=size, with an axis of stage, "
            "data, fsdp, model",
        ),
        (
            ["--mesh", "data=0"],
            "train: argument --mesh: 'data=0' is not of the form axis=size, with an axis of stage, "
            "data, fsdp, model",
        ),
        (["--mesh", "data=2,data=4"], "train: argument --mesh: axis data is named twice in 'data=2,data=4'"),
        (["--mesh", "data=8,model=2"], "train: --mesh data=8,model=2 needs 16 devices, and there are 8"),
        (["--steps", "0"], "train: argument --steps: '0' is not an integer of at least 1"),
        (["--batch", "many"], "train: argument --batch: 'many' is not an integer of at least 1"),
        (["--seed", "-1"], "train: argument --seed: '-1' is not an integer of at least 0"),
        (["--out", "tests"], "train: --out tests is a folder: name a file, tests/loss.png"),
        (["--dropout", "1"], "train: argument --dropout: '1' is not a number from 0 to below 1"),
        (
            ["--compare", "--partitioner", "both"],
            "train: --compare trains by one partitioner: name it, --partitioner shardax or xla",
        ),
        (
            ["--processes", "2"],
            "train: --processes and --coordinator go together: --coordinator 127.0.0.1:7000 --processes 2 "
            "--process 0",
        ),
        (
            ["--coordinator", "127.0.0.1:7000", "--processes", "2", "--process", "2"],
            "train: --process 2 is not one of 0 to 1, as --processes 2 has it",
        ),
        (
            ["--cluster", "--coordinator", "127.0.0.1:7000"],
            "train: --cluster finds the coordinator itself: leave --coordinator out, or --cluster",
        ),
        (
            ["--zero", "3", "--partitioner", "xla"],
            "train: --zero is a transform of shardax: leave it out, or name --partitioner shardax",
        ),
        (["--offload", "both"], "train: --offload is of ZeRO's state: name its stage, --zero 3"),
        (["--epochs", "3"], "train: unrecognized arguments: --epochs 3"),
    ],
)
def test_bad_options(argv, message):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == message


def test_size_must_be_known():
    with pytest.raises(SystemExit, match="train: argument --size: invalid choice: 'huge'"):
        parse(["--size", "huge"])


def test_heads_must_divide_model():
    with pytest.raises(ValueError, match="model=32 must be a multiple of heads=5"):
        gpt2.Config(model=32, heads=5)


def library(root: Path) -> list[Path]:
    for name in ("a", "b", "test/c", "site-packages/d", *(f"p/m{i}" for i in range(60))):
        path = root / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return text.files(root)


def test_files_are_sorted_and_tests_skipped(tmp_path):
    names = [path.relative_to(tmp_path).as_posix() for path in library(tmp_path)]
    assert names == sorted(names)
    assert names[:2] == ["a.py", "b.py"] and len(names) == 62


def test_split_is_disjoint_complete_and_by_name_alone(tmp_path):
    paths = library(tmp_path)
    train, held_out = text.split(paths, tmp_path)
    assert sorted(train + held_out) == sorted(paths) and 0 < len(held_out) < len(train)
    assert text.split(paths[::2], tmp_path)[1] == [path for path in held_out if path in paths[::2]]


def test_standard_library_is_split_the_same_each_time():
    one, two = text.standard_library(), text.standard_library()
    np.testing.assert_array_equal(one.train, two.train)
    np.testing.assert_array_equal(one.held_out, two.held_out)
    assert len(one.train) > 10 * len(one.held_out) > 1_000_000
    assert one.train.max() == text.END == text.VOCAB - 1


def test_tokens_end_each_file(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x\xff")
    assert text.tokens([tmp_path / "a.py"] * 2).tolist() == [120, 255, 256] * 2
    assert text.to_text([120, 256]) == "x\n<end of file>\n"


def test_batches_follow_step_and_seed():
    stream = np.arange(1000, dtype=np.uint16)
    first = text.batch(stream, 0, 0, 4, 16)
    assert first.shape == (4, 17) and first.dtype == np.int32
    np.testing.assert_array_equal(first, text.batch(stream, 0, 0, 4, 16))
    assert (first != text.batch(stream, 1, 0, 4, 16)).any() and (
        first != text.batch(stream, 0, 1, 4, 16)
    ).any()
    np.testing.assert_array_equal(np.diff(first), 1)


def test_held_out_batches_span_the_stream():
    batches = text.even_batches(np.arange(1000, dtype=np.uint16), 3, 2, 16)
    assert batches[0][0, 0] == 0 and batches[-1][-1, -1] == 999 and len(batches) == 3


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("axes", [("data", "model"), ("data", "fsdp", "model"), ("data",)])
def test_specs_fit_the_parameters(axes, scan):
    config = gpt2.Config(scan=scan)
    params = jax.eval_shape(lambda: gpt2.init_params(config, jax.random.key(0)))
    specs = gpt2_sharding.param_specs(params, axes)
    jax.tree.map(
        lambda spec, leaf: len(spec) <= leaf.ndim or pytest.fail(f"{spec} for {leaf}"), specs, params
    )
    used = {axis for spec in jax.tree.leaves(specs) for axis in spec if axis}
    assert used == set(axes) - {"data"}


def test_stacked_layers_stay_whole():
    params = jax.eval_shape(lambda: gpt2.init_params(gpt2.Config(scan=True), jax.random.key(0)))
    specs = gpt2_sharding.param_specs(params, ("data", "model"))
    assert specs["layers"]["mlp"]["down"]["kernel"] == P(None, "model", None)


@pytest.mark.once
@pytest.mark.parametrize("changes", [{"scan": True}, {"remat": True}, {"scan": True, "remat": True}])
def test_scan_and_remat_train_alike(changes):
    config = gpt2.Config(layers=2, heads=2, model=16, seq=8)
    params = gpt2.init_params(config, jax.random.key(0))
    if "scan" in changes:
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), params["layer_0"], params["layer_1"])
        other = {"layers": stacked} | {name: params[name] for name in ("embed", "position", "norm")}
    else:
        other = params
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    changed = gpt2.Config(layers=2, heads=2, model=16, seq=8, **changes)
    np.testing.assert_allclose(
        gpt2.loss(changed, other, tokens), gpt2.loss(config, params, tokens), rtol=1e-6
    )


def small_models():
    rng = np.random.default_rng(0)
    x_BI, y_BO = rng.normal(size=(12, 16)).astype(np.float32), rng.normal(size=(12, 8)).astype(np.float32)
    images_BHWC, labels_B = (
        rng.normal(size=(12, 16, 16, 3)).astype(np.float32),
        rng.integers(0, 10, 12).astype(np.int32),
    )
    return [
        pytest.param(mlp, mlp.Config(), (x_BI, y_BO), id="mlp"),
        pytest.param(convnet, convnet.Config(), (images_BHWC, labels_B), id="convnet"),
        pytest.param(convnet, convnet.Config(pool=True), (images_BHWC, labels_B), id="convnet-pool"),
    ]


@pytest.mark.once
@pytest.mark.parametrize("model, config, batch", small_models())
def test_small_models_train_as_on_one_device(model, config, batch):
    init, step = model.train(config, optax.adamw(1e-2))
    mesh = make_mesh({"data": 2, "model": 4})
    specs = model.param_specs(jax.eval_shape(init, jax.random.key(0)).params, mesh.axis_names)
    sharded = sx.shard_jit(step, mesh=mesh, in_shardings=(State(specs, None, None), model.BATCH))
    np.testing.assert_allclose(
        three_losses(init, sharded, batch), three_losses(init, jax.jit(step), batch), rtol=1e-4
    )


def three_losses(init, step, batch) -> list[float]:
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    return losses


def test_default_size_is_about_two_million():
    params = jax.eval_shape(lambda: gpt2.init_params(gpt2.SIZES["default"], jax.random.key(0)))
    assert 1.7e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 2.3e6


def test_gpt2_xl_has_one_and_a_half_billion():
    params = jax.eval_shape(lambda: gpt2.init_params(gpt2.SIZES["gpt2-xl"], jax.random.key(0)))
    assert 1.55e9 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 1.57e9


def test_dividing_drops_what_does_not():
    mesh = make_mesh({"data": 2, "model": 4})
    assert dividing(P("model", "data"), (257, 4), mesh) == P(None, "data")


def test_plot_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "loss.png"
    report.plot_losses({"a": [2.0, 1.0], "b": [2.0, 1.5]}, path)
    before = path.read_bytes()
    report.plot_losses({"a": [1.0, 0.5]}, path)
    training = path.read_bytes()
    report.plot_losses({"a": [1.0, 0.5]}, path, {1: 1.5, 2: 1.0})
    assert len({before, training, path.read_bytes()}) == 3
    assert [p.name for p in path.parent.iterdir()] == ["loss.png"]

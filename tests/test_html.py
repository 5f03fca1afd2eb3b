"""`Plan.to_html`: one file that needs nothing else, with the program, the ledgers, and what their script
stands on.
"""

import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.picture import Pictures
from shardax.ledger.words import bytes_text

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def loss(params, x_BM):
    h_BH = jax.nn.relu(x_BM @ params["<up>"])
    y_BM = h_BH @ params["down"]
    return jnp.mean(jnp.where(y_BM < 1, y_BM, 0.0))


class Tables(HTMLParser):
    """The text of each cell, by table and row; checks that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.tables, self.open, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in ("meta", "input", "br", "col", "wbr"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        """As <path/> in an SVG, which closes itself."""
        self.attributes += attrs

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture
def page(tmp_path):
    args = {"<up>": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}, jnp.ones((8, 16))
    plan = sx.shard_jit(
        loss, mesh=MESH, in_shardings=({"<up>": P(None, "model"), "down": None}, P("data"))
    ).plan(*args)
    plan.to_html(tmp_path / "plan.html")
    return plan, (tmp_path / "plan.html").read_text(encoding="utf-8")


def parsed(text) -> Tables:
    tables = Tables()
    tables.feed(text)
    assert tables.open == []
    return tables


def test_it_needs_nothing_else(page):
    """Its only links lead to places in it."""
    attributes = parsed(page[1]).attributes
    places = {value for name, value in attributes if name == "id"}
    links = {value for name, value in attributes if name == "href"}
    assert links and all(link[0] == "#" and link[1:] in places for link in links)
    assert "src" not in {name for name, _ in attributes}
    assert not re.search(r"https?:|@import|url\(", page[1])
    assert not re.search(r"@[A-Z]+@", page[1])


def table(text, head: str) -> list[list[str]]:
    """The rows of the first table with this head."""
    return next(t[1:] for t in parsed(text).tables if head in t[0])


def test_the_ledgers(page):
    plan, text = page
    (collective,) = [row for row in table(text, "reason") if row[8].startswith("sum of dot_general")]
    assert collective[:7] == ["reduce_scatter", "model", "f32[2,16]", "1", "64 B", "64 B", "90.1 %"]
    assert len(table(text, "reason")) == len(plan.collectives)
    assert ["params/<up>", "f32[16,32]", "P(None, 'model')", "1.0 KiB"] in table(text, "path")
    assert ["f32[16,16]", "argument params/<up>", "1.0 KiB", ""] in table(text, "from")
    assert [row[0] for row in table(text, "chip")] == ["v3", "v4", "v5e", "v5p", "v6e", "H100", "H200"]


def test_alike_collectives_are_one_row(tmp_path):
    def layers(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return x

    specs = ([P("model")] * 3, P("data", "model"))
    args = [jnp.ones((16, 16))] * 3, jnp.ones((8, 16))
    plan = sx.shard_jit(layers, mesh=MESH, in_shardings=specs).plan(*args)
    plan.to_html(tmp_path / "plan.html")
    rows = table((tmp_path / "plan.html").read_text(encoding="utf-8"), "reason")
    assert sum(int(row[3]) for row in rows) == len(plan.collectives) > len(rows)


def test_numbers_keep_their_values(page):
    assert '<td class="number" data-value="1024"><span title="1,024 bytes">1.0 KiB</span></td>' in page[1]


def test_heads_have_scopes_and_rows_names(page):
    assert page[1].count("<th") == len(re.findall(r'<th(?:ead| scope="(?:col|row)")', page[1]))
    bodies = re.findall(r"<tbody.*?</tbody>", page[1], re.S)
    rows = [row for body in bodies for row in re.findall(r"<tr(?! class=.gap)[^>]*>(<t.)(?! colspan)", body)]
    assert len(rows) > 30 and set(rows) == {"<th"}


def test_contents(page):
    """Each section is listed, in the order of the page."""
    listed = re.findall(r'<li><a href="#([\w-]+)">', page[1])
    assert listed == re.findall(r'<section id="([\w-]+)"', page[1])
    assert listed[:4] == ["lines", "program", "memory", "collectives"] and "arguments" in listed


def test_the_program(page):
    program = table(page[1], "what it makes")
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    h_BH = "))
    assert line[1] == '    h_BH = jax.nn.relu(x_BM @ params["<up>"])'
    assert line[3] == "2 x f32[8,32] P('data', 'model')"
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    y_BM = "))
    assert line[2] == "64 B in 1reduce_scatter over model: 64 B"
    first, *_ = table(page[1], "share")
    assert first[1:5] == ["", "64 B", "90.1 %", "1"] and first[5] == 'y_BM = h_BH @ params["down"]'


def page_of(plan, path) -> str:
    plan.to_html(path / "plan.html")
    return (path / "plan.html").read_text(encoding="utf-8")


def layers_plan(count: int):
    """Layers, each a matrix and a bias, with momentum; the results are the next parameters."""

    def step(params, momentum, x):
        for w, b in params.values():
            x = jnp.sin(x @ w) + b
        return jax.tree.map(lambda p, m: p + m * x.sum(), params, momentum), momentum

    params = {f"layer_{i}": (jnp.ones((16, 16)), jnp.ones(16)) for i in range(count)}
    specs = {name: (P(None, "model"), P("model")) for name in params}
    return sx.shard_jit(step, mesh=MESH, in_shardings=(specs, specs, P("data"))).plan(
        params, params, jnp.ones((8, 16))
    )


@pytest.mark.promotes_ranks
def test_layers_are_folded_and_sorted_as_a_person_counts(tmp_path):
    text = page_of(layers_plan(12), tmp_path)
    arguments, results = (
        table(re.search(f'<section id="{side}".*?</section>', text, re.S)[0], "path")
        for side in ("arguments", "results")
    )
    assert [row[1:] for row in arguments] == [
        ["24 arrays", "as params", "6.4 KiB"],
        ["12 x f32[16,16]", "P(None, 'model')", "6.0 KiB"],
        ["12 x f32[16]", "P('model')", "384 B"],
        ["f32[8,16]", "P('data')", "128 B"],
    ]
    matrices = "".join(f"params/layer_{i}/0" for i in range(12))
    assert arguments[1][0] == "params/layer_{0..11}/0" + matrices
    momentum = matrices.replace("params", "momentum")
    how = "12 x f32[16,16] P(None, 'model')"
    assert arguments[0][0].startswith("momentummomentum/layer_{0..11}/0" + momentum + " " + how)
    ((name, *passed_on),) = results
    assert passed_on == ["48 arrays", "", "12.8 KiB"] and name.startswith(
        "48 as the arguments of the same paths"
    )
    assert name.count(matrices) == name.count(momentum) == 1


def test_results_that_are_passed_on_are_one_fold(tmp_path):
    def step(state):
        return {"w": state["w"] * 2, "v": state["v"] + 1}, state["w"].sum()

    state = {"w": jnp.ones((16, 16)), "v": jnp.ones(16)}
    specs = {"w": P("data"), "v": P("model")}
    text = page_of(sx.shard_jit(step, mesh=MESH, in_shardings=(specs,)).plan(state), tmp_path)
    rows = table(re.search(r'<section id="results".*?</section>', text, re.S)[0], "path")
    assert [row[1] for row in rows] == ["f32[]", "2 arrays"]
    assert rows[1][0].startswith("2 as the arguments of the same paths")
    assert "state/v" in rows[1][0] and "state/w" in rows[1][0]


def test_long_tables_are_folded(tmp_path):
    """Rows past the first, and none where only a few would be."""
    keys = [f"{chr(97 + i)}{chr(97 + j)}" for i in range(4) for j in range(12)]
    for count, bodies in ((48, 3), (42, 1)):
        args = {key: jnp.ones(i + 1) for i, key in enumerate(keys[:count])}
        text = page_of(
            sx.shard_jit(lambda a: sum(v.sum() for v in a.values()), mesh=MESH).plan(args), tmp_path
        )
        section = re.search(r'<section id="arguments".*?</section>', text, re.S)[0]
        assert section.count("<tbody") == bodies and section.count("<tr>") == count + 1 + (bodies > 1)
        assert ("8 more rows" in section) == (bodies > 1)


def test_memory_is_a_curve_with_its_peak_named(page):
    plan, text = page
    memory = plan.memory()
    assert max(m.nbytes for m in memory.curve) == memory.peak
    assert [m.equation for m in memory.curve] == sorted({m.equation for m in memory.curve})
    label = re.search(r'role="img" aria-label="([^"]*)"', text)[1]
    assert f"{bytes_text(memory.peak)} at its peak at tests/test_html.py:" in label
    drawn = [
        float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", re.search(r'class="area" d="([^"]*)"', text)[1])
    ]
    tallest = max(range(len(memory.curve)), key=lambda i: memory.curve[i].nbytes)
    assert min(range(len(drawn)), key=drawn.__getitem__) == 2 * tallest
    stretches = table(text, "alive")
    assert max(int(row[0].replace(",", "")) for row in stretches) <= memory.curve[-1].equation
    assert bytes_text(memory.peak) in [row[1] for row in stretches]


def test_the_curve_of_a_long_program_is_bounded_and_goes_into_loops(tmp_path):
    def long(x):
        for _ in range(700):
            x = jnp.sin(x)
            x = jax.lax.sort(x)
        return jax.lax.scan(lambda c, _: (jax.lax.sort(jax.lax.sort(c) + jnp.roll(c, 1)), None), x, None, 5)[
            0
        ]

    plan = sx.shard_jit(long, mesh=MESH).plan(jnp.ones(256))
    memory = plan.memory()
    assert 100 <= len(memory.curve) <= 200 and max(m.nbytes for m in memory.curve) == memory.peak
    assert len(page_of(plan, tmp_path)) < 400_000
    outside = len(plan.local_jaxpr.jaxpr.eqns[0].params["jaxpr"].eqns)
    assert outside > 1400 and memory.curve[-1].equation > outside


def test_lines_of_files_with_alike_names_are_told_apart(tmp_path, monkeypatch):
    """a-b.py and a_b.py."""
    functions = []
    for name in ("a-b.py", "a_b.py"):
        file = tmp_path / name
        file.write_text("def f(x):\n    return x.sum()\n")
        namespace: dict = {}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        functions.append(namespace["f"])
    plan = sx.shard_jit(
        lambda x: functions[0](x) * functions[1](x[0]), mesh=MESH, in_shardings=P("data")
    ).plan(jnp.ones((8, 8)))
    ids = [value for name, value in parsed(page_of(plan, tmp_path)).attributes if name == "id"]
    assert len(ids) == len(set(ids)) and sum(i.startswith("line-") for i in ids) >= 4


def test_the_arrays_that_can_be_chosen(page):
    """What the picture is drawn from, with the story of each."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', page[1], re.S)[1])
    chosen = [int(value) for name, value in parsed(page[1]).attributes if name == "data-array"]
    assert sorted(set(chosen)) == list(range(len(data["arrays"])))
    (up,) = [array for array in data["arrays"] if array["name"] == "argument params/<up>"]
    assert (up["shape"], up["padded"], up["dims"], up["itemsize"]) == ([16, 32], [16, 32], [[], ["model"]], 4)
    assert (up["mesh"], up["devices"]) == ([["data", 4], ["model", 2]], None)
    assert up["why"] == "  dim 1 is split over model:\n    in_shardings[0]['<up>'] says so"


def arrays(plan, path) -> list[dict]:
    plan.to_html(path / "plan.html")
    return json.loads(
        re.search(r'id="data">(.*?)</script>', (path / "plan.html").read_text(encoding="utf-8"), re.S)[1]
    )["arrays"]


def nested(x):
    y = sx.annotate(jnp.sin(x), P("data"))
    return sx.annotate(y * 2, P(("data", "model"))).sum()


def test_blocks_are_those_of_the_program(tmp_path):
    """257 rows over 4 and over 8: padded once, to 8 blocks of 33, of which those over 4 are two each, not to
    4 of 65.
    """
    plan = sx.shard_jit(nested, mesh=MESH).plan(jnp.ones((257, 8)))
    found = {
        (a["sharding"], tuple(a["padded"]))
        for a in arrays(plan, tmp_path)
        if a["shape"] == [257, 8] and a["dims"][0]
    }
    assert found == {("P('data')", (264, 8)), ("P(('data', 'model'))", (264, 8))}
    made = {
        v: lay for node, d in plan.decisions.pairs() for v, lay in zip(node.outputs, d.results, strict=True)
    }
    pictures = Pictures(plan)
    assert all(
        pictures.of(v).padded == lay.padded
        for v, lay in made.items()
        if plan.values.sharding(v) == lay.sharding
    )


def test_pictures_of_other_meshes(tmp_path):
    """An axis cut in two has its parts; what rests on another mesh, or on devices in another order, has that
    one's.
    """
    devices = np.array(jax.devices())
    wide, tall = (
        Mesh(devices.reshape(n), ("x", "y"), axis_types=(AxisType.Auto,) * 2) for n in ((2, 4), (4, 2))
    )
    turned = NamedSharding(
        Mesh(devices[::-1].reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2), P("y")
    )
    f = sx.shard_jit(
        lambda a, b: (sx.annotate(a, NamedSharding(tall, P("x"))) * 2, b),
        mesh=wide,
        out_shardings=(None, turned),
    )
    found = arrays(f.plan(jnp.ones((8, 8)), jax.device_put(jnp.ones((4, 4)), turned)), tmp_path)
    (doubled,) = [a for a in found if a["name"].startswith("tests/test_html.py")]
    assert (doubled["dims"], doubled["mesh"]) == ([["x", "y.0"], []], [["x", 2], ["y.0", 2], ["y.1", 2]])
    (b,) = [a for a in found if a["name"] == "argument b"]
    assert (b["dims"], b["mesh"], b["devices"]) == (
        [["y"], []],
        [["x", 2], ["y", 4]],
        [7, 6, 5, 4, 3, 2, 1, 0],
    )


def test_text_of_the_program_ends_no_script(tmp_path):
    """A pytree key is the user's text."""
    plan = sx.shard_jit(lambda x: x["</script>"] * 2, mesh=MESH).plan({"</script>": jnp.ones(8)})
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and parsed(text)


def test_why_jax_gave_no_types(tmp_path, page):
    """It stands in the overview, and only where there is a reason."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    step = sx.shard_jit(lambda x: jnp.sort(x, 0), mesh=mesh, in_shardings=P("data"))
    step.plan(jnp.ones((8, 4))).to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    (reason,) = re.findall(r'<p class="untyped">(.*?)</p>', text)
    assert reason.startswith("No Explicit types, so completion decides. JAX: ")
    assert re.search(r"\(at \S*test_html\.py:\d+\)$", reason)
    assert '<p class="untyped">' not in page

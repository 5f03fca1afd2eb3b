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
        if tag not in ("meta", "input", "br", "col"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

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
    assert collective[:7] == ["all_reduce", "model", "f32[2,16]", "1", "128 B", "128 B", "95.5 %"]
    assert len(table(text, "reason")) == len(plan.collectives)
    assert ["argument", "params/<up>", "f32[16,32]", "P(None, 'model')", "1.0 KiB"] in table(text, "path")
    assert ["f32[16,16]", "argument params/<up>", "1.0 KiB", ""] in table(text, "from")
    assert [row[0] for row in table(text, "chip")] == ["v3", "v4", "v5e", "v5p", "v6e", "H200"]


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


def test_the_program(page):
    program = table(page[1], "what it makes")
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    h_BH = "))
    assert line[1] == '    h_BH = jax.nn.relu(x_BM @ params["<up>"])'
    assert line[2] == "2 x f32[8,32] P('data', 'model')"
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    y_BM = "))
    assert line[3].startswith("all_reduce over model: 128 B")


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

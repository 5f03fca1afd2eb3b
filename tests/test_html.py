"""`Plan.to_html`: one file that needs nothing else, with the program, the ledgers, and what their script stands on."""

import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

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
        if tag not in ("meta", "input", "br"):
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
    plan = sx.shard_jit(loss, mesh=MESH, in_shardings=({"<up>": P(None, "model"), "down": None}, P("data"))).plan(*args)
    plan.to_html(tmp_path / "plan.html")
    return plan, (tmp_path / "plan.html").read_text(encoding="utf-8")


def parsed(text) -> Tables:
    tables = Tables()
    tables.feed(text)
    assert tables.open == []
    return tables


def test_it_needs_nothing_else(page):
    tables = parsed(page[1])
    assert not {"src", "href"} & {name for name, _ in tables.attributes}
    assert not re.search(r"https?:|@import|url\(", page[1])


def test_the_ledgers(page):
    plan, text = page
    collectives, places, memory, _ = parsed(text).tables
    assert len(collectives) == 1 + len(plan.collectives)
    assert collectives[1][:4] == ["all_reduce", "model", "f32[2,16]", "128"]
    assert ["argument", "params/<up>", "f32[16,32]", "P(None, 'model')"] in places
    assert ["alive at the peak", "argument params/<up>", "f32[16,16]", "1,024"] in memory


def test_numbers_keep_their_values(page):
    assert '<td class="number" data-value="1024">1,024</td>' in page[1]


def test_the_program(page):
    *_, program = parsed(page[1]).tables
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    h_BH = "))
    assert line[1] == '    h_BH = jax.nn.relu(x_BM @ params["<up>"])'
    assert line[2] == "2 x f32[8,32] P('data', 'model')"
    (line,) = (row for row in program if len(row) == 4 and row[1].startswith("    y_BM = "))
    assert line[3].startswith("all_reduce over model: 128 B")

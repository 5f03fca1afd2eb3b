"""Schedules as pictures, as timelines, and by command."""

import re
from xml.etree import ElementTree

import pytest

from shardax.ledger.words import seconds_text
from shardax.pipeline.__main__ import main
from shardax.pipeline.draw import NUMBERED, draw, title
from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.simulate import Costs, simulate
from shardax.pipeline.table import Instruction
from shardax.pipeline.timeline import color, timeline, timeline_svg

pytestmark = pytest.mark.quick

COSTS = Costs(1e-3, 1e-3, 1e-3, saved=1 << 20, send=2e-4)


def test_a_picture_has_a_box_and_a_number_for_each_instruction(tmp_path):
    file = tmp_path / "it.png"
    schedule = make_schedule("zb-h1", 3, 5)
    axes = draw(schedule, file).axes[0]
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in axes.texts].count("4") == 3 * 3 and len(axes.texts) == 3 * 5 * 3
    assert (
        axes.get_title()
        == title(schedule)
        == "zb-h1: 3 stages, 5 microbatches, 17 ticks, 11.8 % idle, keeps 3"
    )
    by_kind = {text.get_text() for text in draw(schedule).legends[0].get_texts()}
    assert by_kind == {"forward", "backward", "weights' gradients"}


def test_a_picture_of_many_ticks_has_no_numbers():
    schedule = make_schedule("forward", 1, NUMBERED + 1)
    assert not draw(schedule).axes[0].texts


@pytest.mark.parametrize("width", [60, 79, 140])
def test_a_timeline_is_as_wide_as_told(width):
    for name in NAMES:
        for locked in (True, False):
            lines = timeline(simulate(make_schedule(name, 4, 6), COSTS, locked=locked), width).splitlines()[
                1:
            ]
            assert {len(line) for line in lines[1:]} == {width} and len(lines) == 5, name


def test_a_timeline_shows_sends_and_what_is_kept():
    lines = timeline(simulate(make_schedule("forward", 2, 1), Costs(1e-3, send=1e-3)), 60).splitlines()
    assert (
        lines[0]
        == "forward: 2 stages, 1 microbatch: 3 ms in ticks of all stages, bubbles 66.7 %, 1 send of 1 ms"
    )
    busy, sending, idle = (lines[2].count(mark) for mark in ("-", "»", "·"))
    assert sending == pytest.approx(idle, abs=1) and busy + 2 == pytest.approx(idle, abs=1)
    late = timeline(simulate(make_schedule("forward", 2, 1, latency=2), Costs(1e-3, send=1e-3)), 60)
    assert "»" not in late


def test_svg_is_well_formed_and_tells_each_instruction():
    schedule = make_schedule("interleaved", 3, 4)
    done = simulate(schedule, COSTS)
    figure = ElementTree.fromstring(timeline_svg(done))
    titles = [e.text for e in figure.iter("title")]
    assert (
        len(titles) == 3 * 4 * 2 * 2 + 4 * 5 * 2
    )  # the instructions, and what passes between virtual stages
    run = next(run for run in done.runs if repr(run.instruction) == "F3.1" and run.stage == 2)
    assert f"forward of microbatch 3, chunk 1: 1 ms from {seconds_text(run.start)}" in titles
    assert "F0 sent to stage 1: 200 µs from 1 ms" in titles
    label = figure.find("svg").attrib["aria-label"]
    assert label.startswith("interleaved: 3 stages × 2 chunks, 4 microbatches")
    assert not re.search(r"style|script", "".join(e.tag for e in figure.iter()))


def test_colors_are_paler_with_each_chunk():
    shades = [color(Instruction("F", 0, c)) for c in (0, 1, 2)]
    assert shades == sorted(shades) and shades[0] == "#4e8fd0"


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "zb-h1", "--stages", "4", "--microbatches", "8", "--width", "100"]) == 0
    assert (tmp_path / "zb-h1.png").exists()
    printed = capsys.readouterr().out
    assert "stage 3  .  .  . F0 B0 F1" in printed and "wrote zb-h1.png" in printed

    assert main(["list", "--stages", "2", "--microbatches", "4"]) == 0
    assert re.findall(r"^(\S+) +\d+ +\d+ ", capsys.readouterr().out, re.M) == list(NAMES)

    (tmp_path / "mine.txt").write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    assert main(["simulate", "mine.txt", "1f1b", "--stages", "2", "--microbatches", "2", "--timeline"]) == 0
    printed = capsys.readouterr().out
    assert "   mine  " in printed and "mine: 2 stages, 2 microbatches:" in printed

    assert main(["simulate", "--stages", "2", "--limit", "5e6", "--timeline"]) == 0
    printed = capsys.readouterr().out
    assert "-> naive" in printed and "(over the limit)" in printed and "\nnaive: 2 stages" in printed

    assert main(["draw", "no-such", "--out", "x.png"]) == 1
    assert "error: schedule is 'no-such'; expected one of naive," in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "draw", "simulate"])
def test_of_bad_sizes_nothing_is_printed_but_the_error(capsys, command):
    schedule = ["1f1b"] if command != "list" else []
    assert main([command, *schedule, "--stages", "0"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: stages is 0; expected an int") and not printed.out


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    out = str(tmp_path / "none" / "a.png")
    assert main(["draw", "1f1b", "--stages", "2", "--microbatches", "2", "--out", out]) == 1
    assert "a.png cannot be written: No such file or directory" in capsys.readouterr().err

"""The command `python -m shardax.check`: what it finds, prints and returns."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from shardax.check import reasons
from shardax.check.__main__ import main
from shardax.check.samples import SAMPLES, samples
from shardax.check.shards import difference
from shardax.spmd_rules.registry import RULES


@pytest.fixture
def rules_module(tmp_path, monkeypatch):
    """A module of rules of one's own, whose rules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(RULES)

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    RULES.clear()
    RULES.update(before)


MODULE = """
import jax.numpy as jnp
import numpy as np
from jax import lax
from shardax import register_rule

register_rule("cos", {cos!r})
register_rule("sinh", {sinh!r})
X = np.arange(30, dtype="float32").reshape(5, 6)
SAMPLES = {{"cos": (lax.cos, X), "sinh": (lambda x: jnp.sinh(x / 30), X)}}
"""


def _run(module: str, capsys) -> tuple[int, str]:
    status = main(["--module", module, "--cases", "0"])
    return status, capsys.readouterr().out


def test_rules_that_are_right(rules_module, capsys):
    status, out = _run(rules_module("right", MODULE.format(cos="... -> ...", sinh="a b -> a b")), capsys)
    assert status == 0 and "cos                           7 claims on 1 equations\n" in out
    assert "2 rules, failed: none; JAX " in out


def test_missing_claims_fail_with_what_shows_them(rules_module, capsys):
    status, out = _run(rules_module("missing", MODULE.format(cos="... -> ...", sinh="a b! -> a b!")), capsys)
    assert (
        status == 1
        and "sinh ((5, 6),) -> ((5, 6),): dim 1 of operand 0 (factor b) is unsplit and could be kept" in out
    )
    assert (
        "  f, *args = missing.SAMPLES['sinh']; print(shardax.check.missing_claims(f, *args, only='sinh'))\n"
        in out
    )
    assert "2 rules, failed: sinh; JAX " in out


def _in_new_python(text: str, folder):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])
    }
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=env)


def test_wrong_claims_fail_with_what_shows_them(rules_module, capsys, tmp_path):
    text = (
        MODULE.replace("lax.cos,", "lax.cumsum,")
        .replace('"cos"', '"cumsum"')
        .format(cos="a b -> a b", sinh="... -> ...")
    )
    status, out = _run(rules_module("wrong", text), capsys)
    assert status == 1 and "2 rules, failed: cumsum; JAX " in out
    assert "cumsum ((5, 6),) -> ((5, 6),), a (5 in 6) over x: result 0 on one device: " in out
    show = "  f, *args = wrong.SAMPLES['cumsum']; print(shardax.check.check_rule(f, *args, only='cumsum'))\n"
    assert show in out
    (imports,) = {line for line in out.splitlines() if line.startswith("  import ")}
    pasted = _in_new_python(f"{imports.strip()}\n{show.strip()}", tmp_path)
    assert (
        pasted.returncode == 1
        and "these claims are wrong:\ncumsum ((5, 6),) -> ((5, 6),), a (5 in 6) over x" in pasted.stderr
    )


def test_a_rule_without_a_sample_fails(rules_module, capsys):
    text = "import shardax\nshardax.register_rule('my_scale', '... -> ...')"
    status, out = _run(rules_module("unsampled", text), capsys)
    assert status == 1 and "my_scale                   NO SAMPLE of it: give one in SAMPLES" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["nonesuch"], "no rule is registered for nonesuch"),
        (["--module", "json"], "importing json registers no rule"),
        ([], "2"),
    ],
)
def test_bad_words(words, message):
    with pytest.raises(SystemExit, match=message):
        main(words)


def test_built_in_rules(capsys):
    """A few; `make check` tries them all."""
    assert main(["dot_general", "rev", "psum", "rng_uniform", "--cases", "0"]) == 0
    out = capsys.readouterr().out
    assert (
        "psum                       lives inside a shard_map alone" in out
        and "which numbers it makes where is not defined" in out
    )


def test_every_rule_has_a_sample_or_a_reason():
    assert [name for name in RULES if name not in reasons.UNCHECKED and not any(samples(name, count=1))] == []
    assert not set(SAMPLES) & set(reasons.UNCHECKED)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_lost_parts_of_a_sum_are_a_difference(dtype):
    """However coarse the floats are: a sum of which three of four devices' parts are missing is no
    rounding.
    """
    wanted = np.asarray([4.0, -2.0, 1.0], dtype=jnp.dtype(dtype))
    assert difference(wanted, wanted) == ""
    assert difference(np.asarray([4.0, -2.0, 1.0]).astype(wanted.dtype) / wanted.dtype.type(4), wanted) != ""

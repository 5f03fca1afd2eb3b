"""`python -m shardax.check`: tests what the registered rules claim, and finds claims that they could make and
do not.

    python -m shardax.check sort cumsum              these primitives
    python -m shardax.check --all                    every registered rule
    python -m shardax.check --module my.rules        those that importing my.rules registers, and no others
    python -m shardax.check --page                   writes docs/primitives.md

A module of rules has SAMPLES, which has for each primitive a function that uses it, and its arguments:
{"my_scale": (f, x, y)}. The command prints a line for each primitive. It exits with 1 where a claim is wrong,
where a claim is missing that is not on the list of those that are meant to be (`check/reasons.py`), or where
a rule has no sample.
"""

import argparse
import importlib
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardax.check.page import FILE, page
from shardax.check.reasons import UNCHECKED, reason
from shardax.check.rules import AXES, check_rule, missing_of
from shardax.check.samples import Sample, samples
from shardax.spmd_rules.registry import RULES


@dataclass
class Report:
    """What was found of one primitive: how much was tried, wrong claims, missing ones, and those that are
    meant, with why.
    """

    name: str
    tried: int = 0
    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    not_tried: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.missing or not (self.samples or self.not_tried))

    def __str__(self):
        if not self.samples:
            return f"{self.name:26} {self.not_tried or 'NO SAMPLE of it: give one in SAMPLES'}"
        words = [f"{self.tried:4} claims on {self.samples} equations"]
        words += [
            f"{len(claims)} {what}"
            for claims, what in ((self.wrong, "WRONG"), (self.missing, "MISSING"))
            if claims
        ]
        meant = [f"{'':26} {what}: {why}" for what, why in self.meant.items()]
        return "\n".join([f"{self.name:26} {', '.join(words)}", *self.wrong, *self.missing.values(), *meant])


def check(name: str, module_samples: Mapping[str, Any], count: int, module: str = "") -> Report:
    """Tries the rule of one primitive on its samples, and on those of a module."""
    report = Report(name, not_tried=UNCHECKED.get(name, ""))
    for sample in () if report.not_tried else samples(name, module_samples, count, module):
        try:
            _look_for_missing(sample, report, module)
            report.tried += check_rule(sample.f, *sample.args, only=name)[name]
        except AssertionError as error:
            report.wrong.append(
                f"{error}\n{_snippet(sample, module, f'check_rule(f, *args, only={name!r})')}"
            )
        except AttributeError as error:  # a primitive that this JAX does not have
            report.not_tried = f"not in JAX {jax.__version__}: {error}"
    return report


def _look_for_missing(sample: Sample, report: Report, module: str) -> None:
    claims, equations = missing_of(sample.f, sample.args, report.name)
    report.samples += equations
    for claim in claims:
        if why := reason(claim):
            report.meant.setdefault(f"{claim.what} could be {claim.claim}", why)
        else:
            snippet = _snippet(sample, module, f"missing_claims(f, *args, only={report.name!r})")
            report.missing.setdefault(f"{claim.what} could be {claim.claim}", f"{claim}\n{snippet}")


def _snippet(sample: Sample, module: str, call: str) -> str:
    """What shows it again in a new Python."""
    imports = ", ".join(["jax", "shardax.check.samples", *filter(None, [module])])
    devices = f"jax.config.update('jax_num_cpu_devices', {math.prod(AXES.values())})"
    return f"  import {imports}; {devices}\n  {sample.snippet}; print(shardax.check.{call})"


def _chosen(options: argparse.Namespace) -> tuple[list[str], Mapping[str, Any]]:
    """The primitives to check, and the samples that come with them."""
    before = dict(RULES)
    module = importlib.import_module(options.module) if options.module else None
    registered = [name for name, entry in RULES.items() if before.get(name) is not entry]
    if module and not registered:
        raise SystemExit(f"importing {options.module} registers no rule")
    for name in options.names:
        if name not in RULES:
            raise SystemExit(
                f"no rule is registered for {name}: names are those of primitives, such as dot_general"
            )
    primitives = options.names or (registered if module else list(RULES) if options.all else [])
    return sorted(primitives), getattr(module, "SAMPLES", {})


def main(words: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardax.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="names of primitives")
    parser.add_argument("--all", action="store_true", help="every registered rule")
    parser.add_argument("--module", default="", help="import this module first, and check what it registers")
    parser.add_argument(
        "--cases", type=int, default=2, help="so many of JAX's own test cases of each primitive (2)"
    )
    parser.add_argument("--part", default="1/1", help="the k-th of n parts of the primitives: k/n")
    parser.add_argument("--page", action="store_true", help="write docs/primitives.md")
    options = parser.parse_args(words)
    if options.page:
        FILE.write_text(page(FILE.read_text() if FILE.exists() else ""))
        return 0
    primitives, own = _chosen(options)
    if not primitives:
        parser.error("give names of primitives, --all or --module")
    part, parts = map(int, options.part.split("/"))
    primitives, failed = primitives[part - 1 :: parts], []
    with warnings.catch_warnings(action="ignore"):
        for name in primitives:
            report = check(name, own, options.cases, options.module)
            failed += [name] * report.failed
            print(report, flush=True)
    print(f"{len(primitives)} rules, failed: {', '.join(failed) or 'none'}; JAX {jax.__version__}")
    return bool(failed)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", math.prod(AXES.values()))
    sys.exit(main(sys.argv[1:]))

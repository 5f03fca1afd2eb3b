"""A plan as JSON: every number and text that it has, for other programs to read."""

import json
from dataclasses import asdict, replace
from typing import Any

from shardax.cost.chips import CHIPS
from shardax.explain.analysis import Analysis
from shardax.explain.placed import Placed
from shardax.explain.record import record
from shardax.explain.reports import reports
from shardax.explain.values import intermediates
from shardax.ledger.collectives import Collective, array_text


def json_text(plan: Analysis) -> str:
    return json.dumps(as_dict(plan), indent=1)


def as_dict(plan: Analysis) -> dict[str, Any]:
    """The plan in lists, dicts, numbers and strings. Bytes are those that one device holds or sends; phases
    are in seconds.
    """
    return {
        "record": asdict(record(plan)),
        "mesh": dict(plan.mesh.shape),
        "untyped": plan.untyped,
        "comm_bytes": plan.comm_bytes,
        "arguments": [_place(p) for p in plan.arguments()],
        "results": [_place(p) for p in plan.results()],
        "at_rest": [
            {**asdict(entry), "requested": str(entry.requested), "stored": str(entry.stored)}
            for entry in plan.at_rest
        ],
        "collectives": [{**_collective(c), "because": plan.because(c)} for c in plan.collectives],
        "values": [
            {**asdict(x), "sharding": str(x.sharding)} for x in (intermediates(plan) if plan.graph else ())
        ],
        "memory": asdict(plan.memory()),
        "estimates": {name: asdict(plan.estimate(chip)) for name, chip in CHIPS.items()},
        "reports": {found.name: found.data for found in reports(plan)},
        "phases": dict(plan.phases),
    }


def _place(place: Placed) -> dict[str, str]:
    return {
        "path": place.named or place.path,
        "array": array_text(place.aval),
        "sharding": str(place.sharding),
    }


def _collective(c: Collective) -> dict[str, Any]:
    fields = asdict(replace(c, operands=(), cause=None))
    del fields["cause"]
    operands = list(map(array_text, c.operands))
    return {**fields, "also": list(c.also), "operands": operands, "total": c.total}

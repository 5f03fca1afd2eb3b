"""What led to a sharding, and what a line sends, in words."""

from collections import Counter

from shardax.explain.analysis import Analysis
from shardax.explain.values import Story
from shardax.graph.graph import Value
from shardax.ledger.collectives import array_text
from shardax.ledger.lines import is_at
from shardax.ledger.words import times


def why(plan: Analysis, what: str) -> str:
    """What led to the shardings of an argument, or of the values of a line or a name, in words; what a line
    sends, and why.

    Raises:
      ValueError: there is no such value.
    """
    story = Story(plan)
    matches = story.find(what)
    sent = [part for c in plan.collectives for part in c.parts if ":" in what and is_at(part.line, what)]
    if not matches and not sent:
        raise ValueError(
            f"why({what!r}): no argument, line or variable of this program is called so. Give an argument's "
            f"path ({story.example()!r}), a line of the program ('model.py:12'), or a variable that a line "
            "of it assigns"
        )
    alike: dict[tuple, list[Value]] = {}
    for value in matches:
        alike.setdefault((story.line(value), array_text(value.aval), plan.sharding(value)), []).append(value)
    sends = Counter(f"{c}\n    {plan.because(c)}".rstrip() for c in sent)
    stories = [story.tell(values[0], len(values)) for values in alike.values()]
    return "\n".join([*stories, *(times(n) + text for text, n in sends.items())])

"""The arrays of a page that can be chosen, each once: what the picture of one is drawn from."""

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from shardax.explain.analysis import Analysis
from shardax.explain.picture import Picture, Pictures
from shardax.explain.values import Story
from shardax.ledger.collectives import array_text
from shardax.sharding import Sharding


@dataclass
class Arrays:
    """The arrays that can be chosen so far, as `entries`."""

    plan: Analysis
    entries: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[tuple[str, str, Picture], int] = field(default_factory=dict)

    def __post_init__(self):
        self.story = Story(self.plan) if self.plan.graph else None
        self.pictures = Pictures(self.plan) if self.plan.graph else None

    def button(self, name: str, aval, picture: Picture, text: str, why: str = "") -> str:
        """What chooses an array. `why`: the story that the panel tells of it."""
        key = (name, array_text(aval), picture)
        if key not in self.numbers:
            self.numbers[key] = len(self.entries)
            facts = {
                "name": name,
                "type": array_text(aval),
                "shape": aval.shape,
                "itemsize": aval.dtype.itemsize,
                "why": why,
            }
            self.entries.append(facts | asdict(picture))
        number, shown = self.numbers[key], escape(text).replace("/", "/<wbr>")
        return f'<button type="button" class="array" data-array="{number}">{shown}</button>'

    def why(self, value, rests: Sharding | None = None) -> str:
        """The story of a value of the graph. An argument that `rests` so has the story of the value that the
        program computes with.
        """
        if self.story is None or value is None:
            return ""
        story = self.story.tell(value)
        if rests is None or self.plan.sharding(value) == rests:
            return story.split("\n", 1)[1]
        return f"It rests in the nearest sharding that divides it. In the program it is\n{story}"

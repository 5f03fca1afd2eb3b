"""Blocks: parts of a program that are completed alike are completed once.

Completion takes edges from a worklist, lowest level first, then in program order. Nothing else decides, so
what happens inside a block depends only on the messages from outside, and when it had to stop. A block's
`State` stands for that history: blocks of one `Pattern` (the same edges between values in the same places)
that have the same history share the state, and what comes next is computed for the first of them; the others
follow a pointer. The order of events is exactly that of a program without blocks.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardax.completion.cells import Cells
from shardax.completion.edges import LEVELS
from shardax.completion.node_classes import EdgePattern, NodeClass
from shardax.graph.graph import Value
from shardax.sharding import Sharding

Head = tuple[
    int, int
]  # the level and the code of a visit; codes are in program order, forward before backward
Changes = tuple[tuple[int, int], ...]  # a value's place in the block, its new cell


class Pattern:
    """What blocks of the same shape have in common. `shared` holds the places of the values that other blocks
    know too.
    """

    def __init__(
        self,
        classes: Sequence[NodeClass],
        wiring: Sequence[Sequence[int]],
        blanks: Sequence[int],
        shared: Sequence[bool],
    ):
        self.blanks, self.shared = blanks, shared
        self.shared_places = [place for place, is_shared in enumerate(shared) if is_shared]
        self.edges: list[tuple[EdgePattern, tuple[int, ...], tuple[int, ...]]] = []
        self.item_of: list[int] = []
        self.touching: list[list[Head]] = [[] for _ in blanks]
        for item, (node_class, places) in enumerate(zip(classes, wiring, strict=True)):
            for edge in node_class.edges:
                self._add(item, edge, tuple([places[p] for p in edge.places]))
        self.first_edge = [bisect_left(self.item_of, item) for item in range(len(classes) + 1)]
        self.root = State(None, None, None)

    def _add(self, item: int, edge: EdgePattern, wires: tuple[int, ...]) -> None:
        twins = tuple(map(wires.index, wires))
        backward, forward = edge.levels
        code = 2 * len(self.edges)
        for place in dict.fromkeys(wires):
            self.touching[place] += [(forward, code), (backward, code + 1)]
        self.edges.append((edge, wires, twins))
        self.item_of.append(item)


@dataclass(eq=False, slots=True)
class State:
    """What happened to a block so far: `event`, after what happened to `before`. Then `head` is the visit
    that is due, None if none is, and `changes` are the cells of shared values that the event changed."""

    before: "State | None"
    event: tuple | None
    head: Head | None
    changes: Changes = ()
    next: dict[Hashable, "State"] = field(default_factory=dict)
    shardings: list[Sharding] | None = (
        None  # of the block's values, once completion is over; and where each dim was learned
    )
    learned: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class Work:
    """The cells of a block's values, the visits that are due, and where each dim was learned: (edge,
    position).
    """

    def __init__(self, pattern: Pattern, cells: Cells):
        self.pattern, self.table = pattern, cells
        self.cells = list(pattern.blanks)
        self.due: tuple[list[int], ...] = tuple([] for _ in LEVELS)
        self.waiting: set[int] = set()
        self.learned: dict[tuple[int, int], tuple[int, int]] = {}

    def head(self) -> Head | None:
        return next(((level, codes[0]) for level, codes in enumerate(self.due) if codes), None)

    def tell(self, place: int, cell: int, touch: bool) -> Changes:
        self.cells[place] = cell
        if touch:
            self.touch(place)
        return ()

    def release(self) -> Changes:
        for place, cell in enumerate(self.cells):
            if (free := self.table.released(cell)) != cell:
                self.tell(place, free, True)
        return ()

    def touch(self, place: int) -> None:
        """Visits the edges that this value is part of: forward and backward, its siblings on the same side
        learn too.
        """
        for level, code in self.pattern.touching[place]:
            if code not in self.waiting:
                self.waiting.add(code)
                heapq.heappush(self.due[level], code)

    def run(self, phase: int, level: int, code: int) -> Changes:
        """Makes the visits that are due before this one, up to the first that changes what other blocks
        know.
        """
        shared = self.pattern.shared
        while (head := self.head()) is not None and head < (level, code):
            heapq.heappop(self.due[head[0]])
            self.waiting.discard(head[1])
            changed = self.visit(head[1], phase)
            if any(shared[place] for place, _ in changed):
                return tuple((place, cell) for place, cell in changed if shared[place])
        return ()

    def visit(self, code: int, phase: int) -> list[tuple[int, int]]:
        edge, wires, twins = self.pattern.edges[code >> 1]
        cells = self.cells
        lessons = self.table.step(edge, not code & 1, phase, twins, tuple([cells[w] for w in wires]))
        changed = []
        for at, cell, dims in lessons:
            place = wires[at]
            cells[place] = cell
            for dim, source in dims:
                self.learned[place, dim] = code >> 1, source
            self.touch(place)
            changed.append((place, cell))
        return changed


class Block:
    """A part of a program: items (nodes, by their numbers), and values by their places."""

    def __init__(
        self,
        pattern: Pattern,
        items: Sequence[int],
        values: Sequence[Value],
        place: dict[Value, int],
        cells: Cells,
    ):
        self.pattern, self.items, self.values, self.place = pattern, items, values, place
        self.state = pattern.root
        self.table = cells
        self.work: Work | None = None

    def head(self) -> tuple[int, int] | None:
        """Level and item of the visit that is due."""
        head = self.state.head
        return None if head is None else (head[0], self.items[self.pattern.item_of[head[1] >> 1]])

    def happens(self, *event) -> Changes:
        """Lets something happen to the block; the changes are what other blocks must be told."""
        after = self.state.next.get(event)
        if after is None:
            work = self.live()
            changes = _EVENTS[event[0]](work, *event[1:])
            after = self.state.next[event] = State(self.state, event, work.head(), changes)
        else:
            self.work = None
        self.state = after
        return after.changes

    def run(self, phase: int, level: int, item: int) -> Changes:
        """Makes the visits that are due before those of an item at a level."""
        return self.happens("run", phase, level, 2 * self.pattern.first_edge[bisect_left(self.items, item)])

    def live(self) -> Work:
        """The work that the state stands for: kept by the block that came first, else made again from the
        beginning.
        """
        if self.work is None:
            self.work = Work(self.pattern, self.table)
            history, state = [], self.state
            while state.event is not None and state.before is not None:
                history.append(state.event)
                state = state.before
            for event in reversed(history):
                _EVENTS[event[0]](self.work, *event[1:])
        return self.work


_EVENTS: dict[str, Callable[..., Changes]] = {"release": Work.release, "run": Work.run, "tell": Work.tell}


class Worklist:
    """The blocks that have visits due, the earliest visit first: by level, then in program order."""

    def __init__(self, blocks: Sequence[Block], homes: Mapping[Value, Sequence[tuple[Block, int]]]):
        self.blocks, self.homes = blocks, homes
        self.heap: list[tuple[int, int, int]] = []
        self.number = {block: i for i, block in enumerate(blocks)}

    def tell(self, value: Value, cell: int, touch: bool = True) -> None:
        for block, place in self.homes.get(value, ()):
            block.happens("tell", place, cell, touch)
            self._push(block)

    def release(self) -> None:
        for block in self.blocks:
            block.happens("release")
            self._push(block)

    def run(self, phase: int, levels: int = len(LEVELS)) -> None:
        """Makes the visits that are due at the first `levels` levels, and those that they bring about."""
        while self._first() < (levels, 0):
            block = self.blocks[heapq.heappop(self.heap)[-1]]
            for place, cell in block.run(phase, *min(self._first(block), (levels, 0))):
                for other, at in self.homes[block.values[place]]:
                    if other is not block:
                        other.happens("tell", at, cell, True)
                        self._push(other)
            self._push(block)

    def _push(self, block: Block) -> None:
        if (head := block.head()) is not None:
            heapq.heappush(self.heap, (*head, self.number[block]))

    def _first(self, but: Block | None = None) -> tuple[int, int]:
        """The earliest visit that is due, in other blocks than this one."""
        while self.heap:
            level, item, number = self.heap[0]
            block = self.blocks[number]
            if block is not but and block.head() == (level, item):
                return level, item
            heapq.heappop(self.heap)
        return len(LEVELS), 0

"""From which of its layouts a value is brought to each of the others in which it is read, so that all copies
together cost least: a shortest tree from the layout that it is made in (Chu and Liu 1965, Edmonds 1967).

    made as P((x, y)) ── gathered ── P() ── cut ── P(x)     cheaper than to gather P(x) first, then P(), as
                                                            they happen to be read
"""

from collections.abc import Callable, Mapping, Sequence

from shardax.sharding import Layout

Node = Layout | None  # None: any of those that are there


def sources_of(
    have: Sequence[Layout], read: Sequence[Layout], price: Callable[[Layout, Layout], float]
) -> dict[Layout, Layout]:
    """For each layout in which a value is read the one that it is brought from: one of `have`, or another in
    which it is read. Among equals the first.

    >>> from shardax.sharding import Sharding
    >>> made, part, whole = (Layout(Sharding((axes,)), (8,)) for axes in (("x", "y"), ("x",), ()))
    >>> prices = {(made, part): 3, (made, whole): 4, (part, whole): 2, (whole, part): 0}
    >>> found = sources_of([made], [part, whole], lambda a, b: prices[a, b])
    >>> found == {part: whole, whole: made}
    True
    """
    wanted = [layout for layout in dict.fromkeys(read) if layout not in have]
    nearest = {t: min(have, key=lambda source: price(source, t)) for t in wanted}
    if len(wanted) < 2:
        return nearest
    prices: dict[tuple[Node, Node], float] = {(None, t): price(nearest[t], t) for t in wanted}
    prices |= {(s, t): price(s, t) for s in wanted for t in wanted if s != t}
    tree = _tree(None, wanted, prices)
    return {t: nearest[t] if (source := tree[t]) is None else source for t in wanted}


def _tree(root: Node, nodes: Sequence[Node], prices: Mapping[tuple[Node, Node], float]) -> dict[Node, Node]:
    """The parent of each node in the cheapest tree from the root. Each takes the nearest; where that closes a
    circle, this is one node of a smaller problem, whose price says what it takes to open it there.
    """
    parents = {n: min((m for m in (root, *nodes) if m != n), key=lambda m: prices[m, n]) for n in nodes}
    circle = _circle(parents)
    if not circle:
        return parents
    one, rest = circle[0], [n for n in nodes if n not in circle]
    entered = {m: min(circle, key=lambda n: prices[m, n] - prices[parents[n], n]) for m in (root, *rest)}
    left = {n: min(circle, key=lambda m: prices[m, n]) for n in rest}
    fewer = {(m, n): prices[m, n] for m in (root, *rest) for n in rest if m != n}
    fewer |= {(m, one): prices[m, n] - prices[parents[n], n] for m, n in entered.items()}
    fewer |= {(one, n): prices[m, n] for n, m in left.items()}
    found = _tree(root, [*rest, one], fewer)
    first = entered[found[one]]
    opened = {n: left[n] if found[n] == one else found[n] for n in rest}
    return opened | {n: parents[n] for n in circle} | {first: found[one]}


def _circle(parents: Mapping[Node, Node]) -> list[Node]:
    """The nodes of a circle, if there is one."""
    for start in parents:
        path = [start]
        while (parent := parents.get(path[-1])) is not None:
            if parent in path:
                return path[path.index(parent) :]
            path.append(parent)
    return []

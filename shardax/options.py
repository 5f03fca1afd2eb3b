"""Options: what a user may decide about how programs are made. Every field has a documented default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Frozen and hashable; the same options and the same program give the same plan.

    strict (False): refuse a primitive that has no sharding rule, instead of running it replicated with a warning.

    >>> Options(strict=True)
    Options(strict=True)
    """

    strict: bool = False

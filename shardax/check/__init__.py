"""Checkers: of rules, registered by shardax or by you (`python -m shardax.check`), and of your own functions
(`compare`).
"""

from shardax.check.compare import Comparison, Different, Trial, compare
from shardax.check.rules import check_rule, missing_claims
from shardax.check.samples import ramp

__all__ = ["Comparison", "Different", "Trial", "check_rule", "compare", "missing_claims", "ramp"]

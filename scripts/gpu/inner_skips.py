"""Cases that a GoogleTest binary skipped inside a run that passed, with their reasons, from what it printed."""

import re
from collections import Counter

COUNT = re.compile(r"^\[  SKIPPED \] (\d+) tests?[.,]", re.MULTILINE)
REASON = re.compile(r"^\S+:\d+: Skipped\n(.*)$", re.MULTILINE)


def inner_skips(output):
    """{reason: cases}. What was skipped without a reason, or by a reason that was cut off, counts as "no reason given"."""
    reasons = Counter(reason.strip() or "no reason given" for reason in REASON.findall(output))
    skipped = sum(int(count) for count in COUNT.findall(output))
    missing = skipped - sum(reasons.values())
    if missing > 0:
        reasons["no reason given"] += missing
    return dict(reasons)


def lines_of(reasons):
    return [f"{'':10} {'':9}  {count} case{'s' if count > 1 else ''} skipped: {reason}"
            for reason, count in sorted(reasons.items())]

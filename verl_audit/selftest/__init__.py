"""How often the verdict is right: runs of the reference loop, whose cause is known, judged and scored.

Begin reading at `score.py`, which says what right and wrong mean. `run.py` simulates and judges, `hide.py` takes
signals away, `shares.py` and `onsets.py` count, `table.py` prints, `records.py` keeps.
"""

from verl_audit.selftest.hide import Family, families, kept, poorer
from verl_audit.selftest.onsets import DATED, error, words
from verl_audit.selftest.run import BASELINES, HELD_OUT, QUICK, WAYS, Case, cases, judged
from verl_audit.selftest.score import Answer, Judged, Score, Truth, score
from verl_audit.selftest.shares import BY_CAUSE, BY_NEARNESS, BY_SPEED, HIDDEN, RATES, Count, Rate, counted, wilson
from verl_audit.selftest.table import amiss, matrix, text

__all__ = [
    "BASELINES",
    "BY_CAUSE",
    "BY_NEARNESS",
    "BY_SPEED",
    "DATED",
    "HELD_OUT",
    "HIDDEN",
    "QUICK",
    "RATES",
    "WAYS",
    "Answer",
    "Case",
    "Count",
    "Family",
    "Judged",
    "Rate",
    "Score",
    "Truth",
    "amiss",
    "cases",
    "counted",
    "error",
    "families",
    "judged",
    "kept",
    "matrix",
    "poorer",
    "score",
    "text",
    "wilson",
    "words",
]

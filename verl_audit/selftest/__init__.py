"""How often the verdict is right: runs of the reference loop, whose cause is known, judged and scored.

Begin reading at `score.py`, which says what right and wrong mean. `run.py` simulates and judges, `table.py` counts.
"""

from verl_audit.selftest.run import QUICK, WAYS, Case, cases, judged
from verl_audit.selftest.score import Answer, Judged, Score, Truth, score
from verl_audit.selftest.table import RATES, Count, Rate, amiss, matrix, text, wilson

__all__ = [
    "QUICK",
    "RATES",
    "WAYS",
    "Answer",
    "Case",
    "Count",
    "Judged",
    "Rate",
    "Score",
    "Truth",
    "amiss",
    "cases",
    "judged",
    "matrix",
    "score",
    "text",
    "wilson",
]

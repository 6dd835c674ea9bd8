"""A job under way → a better plan for it, without a restart, a stalled step or a change in the numbers.

`tuner.py` records, asks, tries and keeps; `searcher.py` is the process that searches beside rank 0; `verdict.py` judges
two plans by alternating blocks of steps; `expected.py` compares a saved strategy's step with what was predicted.
"""

from offbeat.online.tuner import Tuner

__all__ = ["Tuner"]

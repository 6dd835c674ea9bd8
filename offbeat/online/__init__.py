"""Find a better plan for a running job, without a restart, a stalled step or changed results.

`tuner.py` records, asks, tries and keeps; `steps.py` times steps; `agreement.py` is what the ranks tell each other;
`searcher.py` is the process that searches beside rank 0; `verdict.py` judges two plans by alternating blocks of steps;
`expected.py` compares a saved strategy's step with what was predicted.
"""

from offbeat.online.tuner import Tuner

__all__ = ["Tuner"]

"""Predict how a plan's step runs.

The package itself is the verb: `offbeat.simulate(plan)`. `step_seconds` gives the seconds alone and is faster; `replay`
works on plain task graphs.
"""

import sys
from types import ModuleType

from offbeat.arguments import checked
from offbeat.simulate.fast import step_seconds
from offbeat.simulate.kernel import Replay, replay
from offbeat.simulate.predict import simulate
from offbeat.simulate.taskgraph import TaskGraph

__all__ = ["Replay", "TaskGraph", "replay", "simulate", "step_seconds"]


class _Verb(ModuleType):
    __call__ = staticmethod(checked(simulate))


sys.modules[__name__].__class__ = _Verb

"""Run a plan's step on one rank: send gradients as they become ready, apply updates before they are needed.

`engine.py` walks the step program. `arrivals.py` hears from autograd, `gradients.py` has the states of a step and
decides what `parameter.grad` shows, `updates.py` applies what has arrived, `owners.py` does what servers do. They share
a `Training`.
"""

from offbeat.runtime.engine.engine import Engine, Mode
from offbeat.runtime.engine.training import Training

__all__ = ["Engine", "Mode", "Training"]

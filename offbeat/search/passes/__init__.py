"""The passes, which propose better candidates, in an open and ordered registry."""

from offbeat.search.passes import arrangement, credit, encoding, modules, synchronizer  # noqa: F401 - registers their passes
from offbeat.search.passes.problem import AMP, PASSES, Candidate, Pass, Problem, register_pass, select_passes

__all__ = ["AMP", "PASSES", "Candidate", "Pass", "Problem", "register_pass", "select_passes"]

"""A candidate → better ones: one pass per file, in an open and ordered registry."""

from offbeat.search.passes import (
    accumulate,
    op_fusion,
    precision,
    recompute,
    schedule,
    synchronizer,
    tensor_fusion,
    tensor_partition,
)
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import Pass, pass_names, register_pass, select_passes, unregister_pass

__all__ = [
    "Candidate",
    "Pass",
    "Problem",
    "accumulate",
    "op_fusion",
    "pass_names",
    "precision",
    "recompute",
    "register_pass",
    "schedule",
    "select_passes",
    "synchronizer",
    "tensor_fusion",
    "tensor_partition",
    "unregister_pass",
]

"""Capture a model and an example batch as a ModelGraph."""

from offbeat.graph.capture import capture
from offbeat.graph.model import Constant, ModelGraph, Operator, TensorSpec, Variable

__all__ = ["Constant", "ModelGraph", "Operator", "TensorSpec", "Variable", "capture"]

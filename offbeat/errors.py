"""Exceptions with one sentence that a user can act on."""


class OffbeatError(ValueError):
    """A user error. Its text is one sentence naming the file, the field and the value."""


class CaptureError(OffbeatError):
    """The model could not be traced into a ModelGraph."""


class StrategyError(OffbeatError):
    """A strategy is malformed, or does not fit the model or the cluster."""


class PlanError(OffbeatError):
    """A plan breaks one of the invariants every plan must keep."""


class EmulationError(OffbeatError):
    """The emulated cluster cannot be built on this machine."""

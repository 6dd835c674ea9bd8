"""Use Offbeat's runtime, or its choices, inside other training frameworks.

`accelerate`, `huggingface`, `lightning`: the framework's own loop trains on Offbeat's engine. `ddp`: torch's
DistributedDataParallel stays and takes over a strategy's buckets and encoders. Offbeat itself needs none of the
packages; importing a module whose package is missing says which extra installs it.
"""

from offbeat.errors import OffbeatError


def missing(package: str, extra: str) -> OffbeatError:
    """One sentence for a package that is not installed."""
    return OffbeatError(f"{package} is not installed: run pip install 'offbeat[{extra}]'")

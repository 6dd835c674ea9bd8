"""Functions compiled by numba, whose machine code is kept across runs where there is room for it."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

ROOM_BYTES = 64 * 2**20
"""A disk with less room than this is left alone."""


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function at its first call; `options` are numba's."""
    if function is None:
        return lambda function: compiled(function, **options)
    if _has_room():
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # numba found no folder that it may write to.
            pass
    return numba.njit(**options)(function)


@cache
def _has_room() -> bool:
    """Whether numba's folder is on a disk with room; numba fails when it cannot write all of a file."""
    here = Path(__file__).parent
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        folder = Path(given)
    else:
        folder = here if os.access(here, os.W_OK) else Path.home()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free >= ROOM_BYTES

"""A function's name and JSON arguments on standard input → its value as JSON on OFFBEAT_RESULT_FD.

The rank's side of `Emulation.run_function`, run as `python -m offbeat.emulate.call`.
"""

import importlib
import json
import os
import sys


def main() -> None:
    call = json.load(sys.stdin)
    sys.path[:] = call["path"]
    module, _, name = call["target"].partition(":")
    value = getattr(importlib.import_module(module), name)(*call["args"])
    with os.fdopen(int(os.environ.pop("OFFBEAT_RESULT_FD")), "w") as answer:
        json.dump(value, answer, allow_nan=False)


if __name__ == "__main__":
    main()

"""One rank of a pool: calls as lines of JSON on stdin → answers as lines of JSON on stdout.

With arguments (`workers.py FUNCTION JSON`) it runs that one function as a training script would: an exception ends the
process.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))
import bridging
import checkpoints
import clipping
import encoding
import features
import fully_sharded
import guests
import refusals
import sharding
import switching
import torch
import torch.distributed as dist
import training
import tuning_guests
import tuning_online

import offbeat

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (
        bridging,
        checkpoints,
        training,
        encoding,
        features,
        fully_sharded,
        guests,
        clipping,
        refusals,
        sharding,
        switching,
        tuning_guests,
        tuning_online,
    )
    for name, function in vars(module).items()
    if callable(function) and getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}


def main() -> None:
    assert offbeat.__version__
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))
        return
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    _answer(answers, {"result": "joined"})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": FUNCTIONS[request["function"]](**request["arguments"])}
        except Exception as error:
            answer = {"error": traceback.format_exc(), "kind": type(error).__name__, "message": str(error)}
        _answer(answers, answer)


def _answer(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()

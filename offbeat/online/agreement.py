"""What the ranks of a job tell each other between two steps, through the job's store."""

import json
import zlib
from typing import Any

import orjson

from offbeat.runtime.comm import World

MOST_RECORDING_RANKS = 8


class Agreement:
    """Questions that all ranks ask at the same points."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Keys in the store must differ from those of an earlier tuner.
        self.keys = f"offbeat/online/{world.next_generation()}"
        self.questions = 0

    def _next(self) -> str:
        self.questions += 1
        return f"{self.keys}/{self.questions}"

    def agree(self, answer: Any) -> Any:
        """Rank 0's answer, on every rank."""
        key = self._next()
        if self.world.rank == 0:
            self.world.set(key, json.dumps(answer).encode())
            return answer
        return json.loads(self.world.get(key))

    def ask_all(self, answer: Any) -> list[Any]:
        """Every rank's answer, on every rank."""
        key = self._next()
        self.world.set(f"{key}/{self.world.rank}", json.dumps(answer).encode())
        return [json.loads(self.world.get(f"{key}/{rank}")) for rank in range(self.world.size)]

    def gather(self, lines: list[dict[str, Any]]) -> list[bytes]:
        """The recorded lines of the first ranks, on rank 0."""
        key = self._next()
        recording = range(min(self.world.size, MOST_RECORDING_RANKS))
        if self.world.rank in recording and self.world.rank:
            self.world.set(f"{key}/{self.world.rank}", zlib.compress(orjson.dumps(lines), 1))
        if self.world.rank:
            return []
        others = [self.world.get(f"{key}/{rank}") for rank in recording[1:]]
        return [zlib.compress(orjson.dumps(lines), 1), *others]

"""strategy="auto" on a job under way → what it decided, and how far training ends up from its reference."""

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import small_models
import torch
import torch.distributed as dist
from reference import flat_parameters, reference_run
from training import TIMEOUT, _shared

import offbeat
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.online import searcher, tuner
from offbeat.plan import lower
from offbeat.plan.model import TaskKind
from offbeat.search.optimize import candidates
from offbeat.search.passes import Candidate
from offbeat.strategy import build_strategy

STEPS = 84


def favouring(builder: str, seen: list[int] | None = None) -> type:
    """A search in this process that answers at once, and always favours one builder.

    `seen` gets the number of passes of the graphs it was given.
    """

    def favour(graph: Any, cluster: Any, costs: Any, present: Any, **_: Any) -> list[Candidate]:
        if seen is not None:
            seen.append(graph.passes)
        chosen = build_strategy(builder, graph, cluster)
        found = ((builder, chosen, 1e-3), ("present", present, 2e-3))
        return [Candidate(name, strategy, each, lower(graph, cluster, strategy)) for name, strategy, each in found]

    class Favour:
        failure = ""

        def ask(self, request: dict[str, Any]) -> None:
            try:
                with mock.patch("offbeat.search.optimize.candidates", favour):
                    self.answers = list(searcher.search(request))
            except Exception as error:
                self.failure = str(error)

        def answer(self) -> dict[str, Any]:
            if self.failure:
                raise searcher.SearchFailed(self.failure)
            return self.answers.pop(0)

        def close(self) -> None:
            """Nothing is left behind."""

    return Favour


def tune_online(builder: str, slower: bool, passes: int = 1, no_sync: bool = True) -> dict[str, Any]:
    """Trains with "auto" while the search always favours one builder, whose steps are made slow if asked.

    Each step accumulates the gradients of so many passes over its batch, and synchronises in the last one or in all.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    equal, sizes = (1.0,) * world, (4,) * world
    key = ("mlp", "sgd", "float64", STEPS, world, equal, sizes)
    expected = _shared(key, lambda: reference_run("mlp", "sgd", torch.float64, STEPS, world, equal, sizes))

    net = small_models.make("mlp", torch.float64, seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    names: list[str] = []
    seen: list[int] = []
    original, tuner.start_search = tuner.start_search, favouring(builder, seen)
    seconds: list[float] = []
    try:
        offbeat.distribute(net, trainer, timeout=TIMEOUT)
        runtime = net._offbeat
        for step in range(STEPS):
            begin = time.perf_counter()
            trainer.zero_grad()
            for turn in range(passes):
                local = no_sync and turn < passes - 1
                with net.no_sync() if local else nullcontext():
                    (net(*small_models.batch("mlp", step, rank, torch.float64)) / passes).backward()
            name = runtime.plan.strategy.name
            # What the job starts with takes 50 ms a step, what it is offered 2 or 100.
            time.sleep(0.05 if name != builder else 0.1 if slower else 0.002)
            trainer.step()
            names.append(name)
            seconds.append(time.perf_counter() - begin)
        error = (flat_parameters(net) - expected).abs().max().item()
        predicted = net.offbeat.timeline().iteration_time if rank == 0 else None
        runtime.engine.detach()
        runtime.engine.channels.close()
        runtime.gate.detach()
    finally:
        tuner.start_search = original
    recorded = max(seconds[tuner.WARM_UP_STEPS : tuner.WARM_UP_STEPS + tuner.RECORDED_STEPS + 2])
    return {"error": error, "names": names, "passes": seen, "predicted": predicted, "recorded": recorded}


def step_times(cache: str, most_steps: int) -> dict[str, Any]:
    """Seconds of each step of a job with "auto" until it has settled; compiled code is kept in `cache`."""
    net = small_models.make("mlp", torch.float64)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    seconds: list[float] = []
    with mock.patch.dict(os.environ, NUMBA_CACHE_DIR=cache):
        offbeat.distribute(net, trainer, timeout=TIMEOUT, quiet=True)
        while len(seconds) < most_steps and not net.offbeat.settled:
            begin = time.perf_counter()
            trainer.zero_grad()
            net(*small_models.batch("mlp", len(seconds), dist.get_rank(), torch.float64)).backward()
            time.sleep(0.05)
            trainer.step()
            seconds.append(time.perf_counter() - begin)
        said = [decision.what for decision in net.offbeat.history]
        net._offbeat.release()
    return {"seconds": seconds, "said": said}


def lose_the_search(how: str) -> dict[str, Any]:
    """Trains with "auto" while the searching process is killed or stopped."""
    rank, world = dist.get_rank(), dist.get_world_size()
    equal, sizes = (1.0,) * world, (4,) * world
    key = ("mlp", "sgd", "float64", STEPS, world, equal, sizes)
    expected = _shared(key, lambda: reference_run("mlp", "sgd", torch.float64, STEPS, world, equal, sizes))
    pids: list[int] = []

    class Lost(searcher.Searcher):
        """A searching process that something happens to."""

        def ask(self, request: dict[str, Any]) -> None:
            super().ask(request)
            pids.append(self.process.pid)
            self.process.send_signal({"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])

    net = small_models.make("mlp", torch.float64, seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    with mock.patch.object(tuner, "start_search", Lost), mock.patch.object(searcher, "MOST_SECONDS", 1.0):
        offbeat.distribute(net, trainer, timeout=TIMEOUT)
        seconds = []
        for step in range(STEPS):
            begin = time.perf_counter()
            trainer.zero_grad()
            net(*small_models.batch("mlp", step, rank, torch.float64)).backward()
            time.sleep(0.05)
            trainer.step()
            seconds.append(time.perf_counter() - begin)
        error = (flat_parameters(net) - expected).abs().max().item()
        said = [decision.what for decision in net.offbeat.history]
        net._offbeat.release()
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return {"error": error, "said": said, "seconds": seconds, "left": left}


def encoded_with_leave(allow: list[str]) -> dict[str, Any]:
    """Trains with "auto" on a link that is said to be slow; steps are slow unless something is encoded.

    Encoders of the plan in force at the end, what was measured of them, and how far from exact training that is.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    equal, sizes = (1.0,) * world, (4,) * world
    asked: list[Any] = []

    def on_slow_links(graph: Any, cluster: Any, costs: Costs, *rest: Any, **options: Any) -> list[Candidate]:
        asked.append(costs.encoding_seconds_per_byte)
        fits = {(kind, world): CollectiveFit(1e-5, 0.0, 1e-4) for kind in get_args(TaskKind)}
        return candidates(graph, cluster, replace(costs, collectives=fits), *rest, **options)

    class Here:
        """The real search, in this process."""

        def ask(self, request: dict[str, Any]) -> None:
            with mock.patch.multiple("offbeat.search.optimize", SEARCH_SECONDS=1.5, candidates=on_slow_links):
                self.answers = list(searcher.search(request))

        def answer(self) -> dict[str, Any]:
            return self.answers.pop(0)

        def close(self) -> None:
            """There is no process to end."""

    net = small_models.make("mlp", torch.float32, seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())

    def encoders() -> list[str]:
        return sorted({message.encoder.name for message in net._offbeat.plan.messages})

    with mock.patch.object(tuner, "start_search", Here):
        offbeat.distribute(net, trainer, timeout=TIMEOUT, allow=allow, quiet=True)
        step = 0
        while step < 2 * STEPS and not net.offbeat.settled:
            trainer.zero_grad()
            net(*small_models.batch("mlp", step, rank, torch.float32)).backward()
            time.sleep(0.06 if encoders() == ["none"] else 0.002)
            trainer.step()
            step += 1
        net.flush()
        expected = reference_run("mlp", "sgd", torch.float32, step, world, equal, sizes)
        said = [decision.what for decision in net.offbeat.history]
        runtime, found = net._offbeat, encoders()
        error = (flat_parameters(net) - expected).abs().max().item()
        runtime.engine.detach()
        runtime.engine.channels.close()
        runtime.gate.detach()
    return {"encoders": found, "measured": asked, "error": error, "said": said}

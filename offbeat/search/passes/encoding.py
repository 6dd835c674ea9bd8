"""The pass that encodes gradients, variable by variable, with the encoders that the user allows.

Each variable gets the allowed encoder that takes the link and the device least. Then encoders are taken off again,
from those that save least, as long as replay says that the step does not get longer: what is hidden behind compute
stays exact. Encoding takes the seconds that were measured (`Costs.encoding_seconds_per_byte`), else a guess.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offbeat.cost.measured import encoding_seconds
from offbeat.errors import OffbeatError
from offbeat.graph import Variable
from offbeat.plan.compress import encoded_bytes
from offbeat.search.arrange import explicit, rescheduled
from offbeat.search.pace.strategy import pace_schedule
from offbeat.search.passes.problem import AMP, Candidate, Problem, register_pass
from offbeat.search.passes.synchronizer import SLICE_BYTES
from offbeat.simulate.fast.gradients import link_seconds
from offbeat.strategy import Encoder, Shard, Strategy

ENCODERS = {
    "bf16": Encoder(name="bf16"),
    "fp16": Encoder(name="fp16"),
    "int8": Encoder(name="int8"),
    "sign": Encoder(name="sign"),
    "topk": Encoder(name="topk", ratio=0.01),
    "randomk": Encoder(name="randomk", ratio=0.01),
    "powersgd": Encoder(name="powersgd", rank=4),
}
"""Allowed encoders, with the default ratio or rank; 'powersgd:2' gives another."""
_WORTH = 1e-4
"""Share of the step that encoding must save; less is not worth a rounded gradient."""
_MOST_LOOKS = 48
"""Variables tried without their encoder one by one."""


def allowed_encoders(allow: Sequence[str]) -> tuple[Encoder, ...]:
    """The encoders that a user names: 'bf16', 'topk:0.01' (its ratio), 'powersgd:4' (its rank); 'amp' is none."""
    if isinstance(allow, str):
        raise OffbeatError(f"allow: {allow!r} must be a list of encoders")
    return tuple(_encoder(str(name)) for name in allow if name != AMP)


def _encoder(text: str) -> Encoder:
    name, _, value = text.partition(":")
    if name not in ENCODERS:
        raise OffbeatError(f"allow: unknown encoder {name!r}; known: {', '.join(ENCODERS)}, amp")
    known = ENCODERS[name]
    if not value:
        return known
    try:
        # Built anew, so that the value is checked.
        if known.rank is not None:
            return Encoder(name=known.name, rank=int(value))
        return Encoder(name=known.name, ratio=float(value))
    except (ValueError, OffbeatError):
        need = "a rank of 1 or more" if known.rank else "a ratio up to 1" if known.ratio else "no value"
        raise OffbeatError(f"allow: {text!r} is not an encoder: {name} takes {need}") from None


@register_pass("encode", order=60)
def encode(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Encodes the fewest variables that give the shortest step, each with its best encoder."""
    encoders = allowed_encoders(problem.allow)
    if not encoders or len(candidate.plan.replicas) < 2:
        return
    saved: dict[str, float] = {}
    chosen: dict[str, Encoder] = {}
    for variable in problem.graph.gradient_order:
        shards = candidate.strategy.config(variable.name).shards
        fitting = [each for each in encoders if all(_takes(shard, each, variable) for shard in shards)]
        if fitting:
            plain = _seconds(candidate, problem, variable, Encoder())
            best = min(fitting, key=lambda each: _seconds(candidate, problem, variable, each))
            saved[variable.name] = plain - _seconds(candidate, problem, variable, best)
            chosen[variable.name] = best
    ranked = sorted((name for name in saved if saved[name] > 0), key=lambda name: -saved[name])
    if not ranked:
        return
    made = _made(candidate, problem, {name: chosen[name] for name in ranked})
    if made.seconds >= candidate.seconds * (1 - _WORTH):
        return
    yield _needed(candidate, problem, made, ranked, chosen).strategy


def _needed(
    candidate: Candidate, problem: Problem, made: Candidate, ranked: list[str], chosen: Mapping[str, Encoder]
) -> Candidate:
    """`made` with as few of the encoded variables as keep its step."""
    kept = {name: chosen[name] for name in ranked}
    limit = made.seconds * (1 + _WORTH)

    def first(count: int) -> Candidate:
        return _made(candidate, problem, {name: chosen[name] for name in ranked[:count]})

    fewest = 1 + bisect_left(range(1, len(ranked)), True, key=lambda count: first(count).seconds <= limit)
    if fewest < len(ranked):
        made, kept = first(fewest), {name: chosen[name] for name in ranked[:fewest]}
    for name in list(reversed(kept))[:_MOST_LOOKS]:
        fewer = {other: encoder for other, encoder in kept.items() if other != name}
        if problem.expired or not fewer:
            break
        without = _made(candidate, problem, fewer)
        if without.seconds <= limit:
            made, kept = without, fewer
    return made


def _made(candidate: Candidate, problem: Problem, encoders: Mapping[str, Encoder]) -> Candidate:
    """The candidate with these variables encoded, with its schedule or a better one."""
    variables = dict(candidate.strategy.variables)
    for name, encoder in encoders.items():
        config = candidate.strategy.config(name)
        shards = tuple(shard.model_copy(update={"encoder": encoder}) for shard in config.shards)
        variables[name] = config.model_copy(update={"shards": shards})
    changed = candidate.strategy.model_copy(update={"variables": variables})
    return min(_scheduled(changed, candidate, problem, encoders), key=lambda each: each.seconds)


def _scheduled(
    changed: Strategy, candidate: Candidate, problem: Problem, encoders: Mapping[str, Encoder]
) -> Iterator[Candidate]:
    """Explicit slices apply only if every message is encoded uniformly by an encoder that can be cut."""
    if not changed.schedule.order or _alike(candidate, encoders):
        yield problem.evaluate(changed, "encode")
    slice_bytes = changed.schedule.slice_bytes or SLICE_BYTES
    loose = rescheduled(changed, policy="priority", slice_bytes=slice_bytes, order=())
    made = problem.evaluate(loose, "encode")
    yield made
    gradients = problem.gradients(made)
    if gradients is not None and problem.mode != "barrier":
        yield problem.evaluate(explicit(gradients, *pace_schedule(gradients), loose), "encode")


def _alike(candidate: Candidate, encoders: Mapping[str, Encoder]) -> bool:
    def one(names: Iterable[str]) -> bool:
        used = {encoders.get(name) for name in names}
        return used == {None} or (len(used) == 1 and all(each is None or each.sliceable for each in used))

    return all(one(message.variables) for message in candidate.plan.messages)


def _takes(shard: Shard, encoder: Encoder, variable: Variable) -> bool:
    """Whether a float32 gradient that is sent exactly so far may be encoded and becomes smaller."""
    if shard.encoder.name != "none" or shard.staleness or shard.asynchronous or shard.stations:
        return False
    possible = {
        "all_reduce": True,
        "parameter_server": encoder.name != "powersgd",
        "sharded": encoder.sliceable,
    }
    smaller = encoded_bytes(encoder, variable.shape, 4) < variable.bytes
    return variable.dtype == "float32" and possible.get(shard.synchronizer, False) and smaller


def _seconds(candidate: Candidate, problem: Problem, variable: Variable, encoder: Encoder) -> float:
    """Seconds of a variable alone on the link, and of the device to encode it."""
    link = link_seconds(candidate.plan, problem.costs, variable, Shard(encoder=encoder))
    return link + encoding_seconds(candidate.plan, problem.costs, encoder, variable.bytes)

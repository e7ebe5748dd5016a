"""Find where two runs diverge first, and why.

    traces/step_K: data, pixels, weights, sampling seed, kernels --.
    scores/step_K: the trainer's logprobs and advantages ----------->-- the first difference
    weights/history: the version that the step makes --------------'        + settings = cause

Rollouts are matched by their ids, which are the same in every run. Reads only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from sightline.errors import ConfigError
from sightline.regular_file import read_bytes
from sightline.run.run_dir import RunDir
from sightline.trace import Node, PolicySpan, Trace, read_traces
from sightline.view.compare import compare_settings
from sightline.view.formatting import NOTHING, clean
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.wire.micro_batch import StepScores
from sightline.wire.weights import read_history

SETTINGS, DATA, PIXELS, WEIGHTS = "settings", "data", "pixels", "weights"
SEED, KERNELS = "sampling seed", "kernels"
CAUSES = {
    SETTINGS: "the run files differ",
    DATA: "the environment gives different tasks, messages, images or rewards",
    PIXELS: "the same image gives different pixels",
    WEIGHTS: "the inputs are equal, but the weights differ",
    SEED: "equal inputs and weights are sampled with different seeds",
    KERNELS: "equal inputs, weights and seeds give different values",
}
"""The causes, in the order in which they are checked, with what each means."""
INEXACT = "with [model] exact = false, values also depend on what is computed together"
PLACES = {
    "address", "cache_dir", "control_token", "dir", "host", "output_dir", "path", "port", "python",
    "root", "servers", "tls_cert", "tls_key", "token",
}  # fmt: skip
"""Settings with these last names say where something is. What is there is compared instead."""
OTHER_SECTIONS = ("launch.", "logging.")
MAX_VALUE_CHARS = 300


class Difference(NamedTuple):
    cause: str
    what: str
    values: tuple[Any, Any]
    """The values of both runs."""
    token: int | None = None
    """Index of the token in its branch."""
    step: int = 0
    trace: str = ""


class Bisection(NamedTuple):
    names: tuple[str, str]
    steps: int
    """Number of steps that both runs have."""
    settings: dict[str, tuple[str, str]]
    """Settings that differ, without names and paths."""
    difference: Difference | None
    is_exact: bool

    @property
    def cause(self) -> str:
        assert self.difference is not None
        of_seed = self.difference.cause == SEED and self.settings.keys() == {"run.seed"}
        return SETTINGS if self.settings and not of_seed else self.difference.cause


def bisect_runs(first: RunDir, second: RunDir) -> Bisection:
    run_dirs = [get_run_dir(run_dir.path) for run_dir in (first, second)]
    files = [RunFiles(run_dir) for run_dir in run_dirs]
    for file in files:
        _check_comparable(file)
    ends = [max(map(_read_number, d.traces.glob("step_*.msgpack")), default=0) for d in run_dirs]
    if not (steps := min(ends)):
        raise ConfigError("the runs have no step in common", "name two runs that have trained")
    settings = {
        name: (one, other)
        for name, one, other in compare_settings([[run_dir] for run_dir in run_dirs])
        if name.rpartition(".")[2] not in PLACES and not name.startswith(OTHER_SECTIONS)
    }
    differences = (
        difference._replace(step=step)
        for step in range(1, steps + 1)
        for difference in _compare_step(run_dirs, step)
    )
    return Bisection(
        (str(first.path), str(second.path)),
        steps,
        settings,
        next(differences, None),
        all(file.get_section("model").get("exact") for file in files),
    )


def _check_comparable(file: RunFiles) -> None:
    if "sft" in file.settings:
        raise ConfigError(f"{file.run_dir.path} is a supervised run", "name runs of `sightline rl`")
    if (lag := file.get_section("orchestrator").get("max_lag", 1)) != 0:
        raise ConfigError(
            f"{file.run_dir.path} has [orchestrator] max_lag = {lag}: which version samples a "
            "rollout depends on time, so two such runs always diverge",
            "repeat both runs with orchestrator.max_lag=0",
        )


def _compare_step(run_dirs: Sequence[RunDir], step: int) -> Iterator[Difference]:
    one, other = (
        {trace.id: trace for trace in read_traces(run_dir.traces_of(step))} for run_dir in run_dirs
    )
    is_same_model = len({_read_model_digest(run_dir) for run_dir in run_dirs}) == 1
    for name in sorted(one.keys() & other.keys(), key=_order):
        for difference in _compare_traces(one[name], other[name], is_same_model):
            yield difference._replace(trace=name)
    for name in sorted(one.keys() ^ other.keys(), key=_order):
        yield Difference(DATA, "the rollout is played", (name in one, name in other), trace=name)
    scores = [run_dir.scores_of(step) for run_dir in run_dirs]
    if all(file.is_file() for file in scores):
        mine, theirs = (StepScores.from_bytes(read_bytes(file)) for file in scores)
        yield from _compare_scores(mine, theirs, one)
    versions = [
        {line.version: line.sha256 for line in read_history(run_dir.weights)}.get(step)
        for run_dir in run_dirs
    ]
    if None not in versions and versions[0] != versions[1]:
        what = f"digest of the weights that step {step} makes"
        yield Difference(KERNELS, what, (versions[0], versions[1]))


def _compare_traces(one: Trace, other: Trace, is_same_model: bool) -> Iterator[Difference]:
    """Yield differences in the order in which the rollout was played, and then of its result."""
    yield from _compare_fields(DATA, one, other, "env", "task", "split")
    for mine, theirs in zip(one.nodes, other.nodes, strict=False):
        start = sum(len(one.nodes[n].token_ids) for n in one.path(mine.id)[:-1])
        yield from _compare_inputs(mine, theirs, start)
        seeds = one.seed, other.seed
        yield from _compare_sampled(mine, theirs, start + mine.sampled_start, seeds, is_same_model)
    if len(one.nodes) != len(other.nodes):
        yield Difference(DATA, "number of messages", (len(one.nodes), len(other.nodes)))
    results = ("reward", "rewards", "per_turn", "truncated", "error_kind")
    yield from _compare_fields(DATA, one, other, *results)


def _compare_inputs(mine: Node, theirs: Node, start: int) -> Iterator[Difference]:
    """Yield differences of what the environment and the processor gave. `start` is the index of
    the nodes' first token."""
    shown = _list_images(mine), _list_images(theirs)
    if shown[0] != shown[1]:
        yield Difference(DATA, "digests of images", shown, token=start)
    if not mine.is_turn or not theirs.is_turn:
        for difference in _compare_fields(DATA, mine, theirs, "parent", "message"):
            yield difference._replace(token=start)
    for slot, like in zip(mine.slots, theirs.slots, strict=False):
        fields = (*_compare_fields(PIXELS, slot.item, like.item, "fingerprint", "grid"),
                  *_compare_fields(PIXELS, slot, like, "pixel_digest"))  # fmt: skip
        for difference in fields:
            what = f"{difference.what} of {slot.item.name}"
            yield difference._replace(what=what, token=start + slot.offset)
    prompts = [n.token_ids.numpy()[: n.sampled_start] for n in (mine, theirs)]
    if (at := _find_first(*prompts)) is not None:
        yield Difference(DATA, "prompt token", _get(prompts, at), token=start + at)


def _list_images(node: Node) -> list[str]:
    return [ref.digest for slot in node.slots for ref in slot.item.refs]


def _compare_sampled(
    mine: Node, theirs: Node, start: int, seeds: tuple[int, int], is_same_model: bool
) -> Iterator[Difference]:
    """Yield the first difference of the sampled tokens, which begin at `start` of the branch."""
    for span, like in zip(mine.versions, theirs.versions, strict=False):
        is_same = span.digest == like.digest or not (span.digest and like.digest)
        if span.version != like.version or not is_same:
            policies = _name_policy(span), _name_policy(like)
            yield Difference(WEIGHTS, "policy", policies, token=start + span.start)
    tokens = [node.token_ids.numpy()[node.sampled_start :] for node in (mine, theirs)]
    logprobs = [node.logprobs.numpy() for node in (mine, theirs)]
    found = [at for at in (_find_first(*tokens), _find_first(*logprobs)) if at is not None]
    if not found:
        return
    at = min(found)
    ids = _get(tokens, at)
    is_same_token = ids[0] == ids[1]
    what = f"logprob of token {ids[0]}" if is_same_token else "sampled token"
    values = _get(logprobs, at) if is_same_token else ids
    if not is_same_model:
        yield Difference(WEIGHTS, f"{what}, from other checkpoints", values, token=start + at)
    if seeds[0] != seeds[1] and not is_same_token:
        yield Difference(SEED, "seed", seeds, token=start + at)
    yield Difference(KERNELS, what, values, token=start + at)


def _name_policy(span: PolicySpan) -> str:
    return f"version {span.version} {span.digest}".strip()


def _compare_scores(
    one: StepScores, other: StepScores, traces: Mapping[str, Trace]
) -> Iterator[Difference]:
    mine, theirs = ({(o.trace_id, o.node): o for o in scores.origins} for scores in (one, other))
    for name, number in sorted(mine.keys() ^ theirs.keys(), key=lambda key: _order(key[0])):
        is_trained = (name, number) in mine, (name, number) in theirs
        yield Difference(DATA, f"node {number} trains", is_trained, trace=name)
    for key in sorted(mine.keys() & theirs.keys(), key=lambda key: (_order(key[0]), key[1])):
        for field in ("logprobs", "advantages"):
            values = [
                getattr(scores, field).numpy()[origins[key].start : origins[key].stop]
                for scores, origins in ((one, mine), (other, theirs))
            ]
            if (at := _find_first(*values)) is not None:
                what = f"the trainer's {field.removesuffix('s')}"
                token = at + _find_sampled(traces.get(key[0]), key[1])
                pair = _get(values, at)
                yield Difference(KERNELS, what, pair, token=token, trace=key[0])


def _find_sampled(trace: Trace | None, number: int) -> int:
    """Return the index of a node's first sampled token in its branch. Replayed traces give 0."""
    if trace is None:
        return 0
    before = (len(trace.nodes[n].token_ids) for n in trace.path(number)[:-1])
    return sum(before) + trace.nodes[number].sampled_start


def _compare_fields(cause: str, one: Any, other: Any, *names: str) -> Iterator[Difference]:
    for name in names:
        values = getattr(one, name), getattr(other, name)
        if values[0] != values[1]:
            yield Difference(cause, name, values)


def _find_first(one: np.ndarray, other: np.ndarray) -> int | None:
    """Return the first index at which two arrays differ, or at which one has ended."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    if len(differing):
        return int(differing[0])
    return None if len(one) == len(other) else length


def _get(arrays: Sequence[np.ndarray], at: int) -> tuple[Any, Any]:
    """Return the elements of two arrays at an index, which may be the end of one."""
    one, other = (array[at].item() if at < len(array) else NOTHING for array in arrays)
    return one, other


def _read_model_digest(run_dir: RunDir) -> str:
    """Return the digests of the weights that the run began with. Empty if they are unknown."""
    try:
        digests = msgspec.json.decode(read_bytes(run_dir.model_digests), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return ""
    return str(sorted((k, v) for k, v in digests.items() if k.endswith(".safetensors")))


def _read_number(file: Any) -> int:
    return int(re.sub(r"\D", "", file.stem) or 0)


def _order(name: str) -> list[int]:
    """Sort rollouts by the numbers in their ids: g9.0 comes before g10.0."""
    return [int(digits) for digits in re.findall(r"\d+", name)]


def print_bisection(bisection: Bisection) -> None:
    def write(text: str) -> None:
        Console().print(clean(text), highlight=False, markup=False, soft_wrap=True)

    settings = "; ".join(f"{k} = {a} and {b}" for k, (a, b) in bisection.settings.items())
    difference = bisection.difference
    if difference is None:
        write(f"no difference in {bisection.steps} steps")
        if settings:
            write(f"settings that differ: {settings}")
        return
    place = f"step {difference.step}"
    place += f", trace {difference.trace}" if difference.trace else ""
    place += f", token {difference.token}" if difference.token is not None else ""
    write(f"first difference: {place}: {difference.what}")
    for name, value in zip(bisection.names, difference.values, strict=True):
        write(f"  {name}: {value!r:.{MAX_VALUE_CHARS}}")
    note = f". {INEXACT}" if bisection.cause == KERNELS and not bisection.is_exact else ""
    detail = f" ({settings})" if bisection.cause == SETTINGS else ""
    write(f"cause: {bisection.cause}: {CAUSES[bisection.cause]}{detail}{note}")

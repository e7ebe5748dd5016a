"""Which policies this run has published: nothing else samples for it, nothing else is adopted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sightline.errors import EngineError, PolicyMismatch, SightlineError
from sightline.trace import Trace
from sightline.wire.control import PublishedWeights
from sightline.wire.generate import WRONG_ANSWER
from sightline.wire.weights import (
    MANIFEST,
    Manifest,
    PolicyLabel,
    read_manifest,
    read_policies,
    resolve_manifest,
)


@dataclass
class PublishedPolicies:
    run: str
    weights: Path
    """The folder of the run's versions, with their history."""
    owns_servers: bool
    """Whether the run starts its servers, which then hold its checkpoint as version 0."""
    known: set[PolicyLabel] = field(init=False)
    last: int | None = None
    """The version that was published last in this process."""

    def __post_init__(self) -> None:
        self.known = read_policies(self.weights, self.run)
        if self.owns_servers:
            self.known.add(Manifest(version=0, vision_version=0, files=[], run=self.run).policy)

    def check_trace(self, trace: Trace) -> None:
        """Raises for what ends the run, not one rollout: an answer that no server of ours gives, or
        that another policy sampled."""
        if trace.error_kind == WRONG_ANSWER:
            problem, _, fix = trace.error.partition("\n  fix: ")
            raise EngineError(f"rollout {trace.id}: {problem}", fix, WRONG_ANSWER, status=502)
        foreign = {span.policy for node in trace.nodes for span in node.versions} - self.known
        if foreign:
            found = min(foreign)
            names = {label.version: str(label) for label in sorted(self.known)}
            ours = (
                f"it published {names[found.version]}" if found.version in names else "it did not"
            )
            raise PolicyMismatch(
                f"rollout {trace.id} was sampled by the weights {str(found)!r}, which run "
                f"{self.run} did not publish ({ours} as version {found.version})",
                "let no other run or person change the weights of this run's servers, then resume; "
                "no sample of that rollout was trained on",
            )

    def check_published(self, published: PublishedWeights, announced: int) -> None:
        """Raises unless the message is about weights that the trainer has published now, on top of
        batches up to step `announced`."""
        version, last = published.version, self.last
        if not 0 <= version <= announced or (last is not None and version != last + 1):
            raise self._refusal(
                published,
                f"batches up to step {announced} are announced, and the version before it was "
                f"{'none' if last is None else last}",
            )
        if not 0 <= published.checkpoint_step <= version:
            raise self._refusal(published, f"its checkpoint is of step {published.checkpoint_step}")
        try:
            path = resolve_manifest(str(self.weights.parent / published.manifest), self.weights)
            if path.name != MANIFEST or path.parents[1] != Path(os.path.realpath(self.weights)):
                raise PolicyMismatch("its manifest is not in the folder of a version", "")
            found = read_manifest(path).policy
        except SightlineError as error:
            raise self._refusal(published, error.problem) from error
        if found[:3] != (version, published.epoch, self.run):
            raise self._refusal(published, f"its manifest is of {found}")
        if found not in read_policies(self.weights, self.run):
            raise self._refusal(published, f"the history of versions does not have {found}")
        self.known.add(found)
        self.last = version

    def _refusal(self, published: PublishedWeights, why: str) -> PolicyMismatch:
        return PolicyMismatch(
            f"a message says that version {published.version} of run {self.run} is published, and "
            f"it is not: {why}",
            "no weights were adopted; resume the run, and find out which process sent it",
        )

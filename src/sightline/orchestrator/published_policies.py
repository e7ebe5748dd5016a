"""The policies that this run has published. No other policy may sample for it or be adopted."""

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
    """The folder of the run's versions and their history."""
    owns_servers: bool
    """Whether the run starts its servers. They then hold its checkpoint as version 0."""
    known: set[PolicyLabel] = field(init=False)
    last: int | None = None
    """The last version published to this process."""

    def __post_init__(self) -> None:
        self.known = read_policies(self.weights, self.run)
        if self.owns_servers:
            self.known.add(Manifest(version=0, vision_version=0, files=[], run=self.run).policy)

    def check_trace(self, trace: Trace) -> None:
        """Raise if a trace must end the run: an invalid answer, or one from another policy."""
        if trace.error_kind == WRONG_ANSWER:
            problem, _, fix = trace.error.partition("\n  fix: ")
            raise EngineError(f"rollout {trace.id}: {problem}", fix, WRONG_ANSWER, status=502)
        foreign = {span.policy for node in trace.nodes for span in node.versions} - self.known
        if foreign:
            label = min(foreign)
            names = {known.version: str(known) for known in sorted(self.known)}
            ours = names.get(label.version, "nothing")
            raise PolicyMismatch(
                f"rollout {trace.id} was sampled by the weights {str(label)!r}, which run "
                f"{self.run} did not publish (it published {ours} as version {label.version})",
                "make sure that nothing else changes the weights of this run's servers, then "
                "resume; the run did not train on that rollout",
            )

    def check_published(self, published: PublishedWeights, announced: int) -> None:
        """Raise unless the trainer has just published this, from batches up to `announced`."""
        version, last = published.version, self.last
        if not 0 <= version <= announced or (last is not None and version != last + 1):
            raise self._refusal(
                published,
                f"batches up to step {announced} were announced, and the last version was {last}",
            )
        if not 0 <= published.checkpoint_step <= version:
            raise self._refusal(published, f"its checkpoint has step {published.checkpoint_step}")
        try:
            path = resolve_manifest(str(self.weights.parent / published.manifest), self.weights)
            if path.name != MANIFEST or path.parents[1] != Path(os.path.realpath(self.weights)):
                raise PolicyMismatch("its manifest is not in the folder of a version", "")
            label = read_manifest(path).policy
        except SightlineError as error:
            raise self._refusal(published, error.problem) from error
        if label[:3] != (version, published.epoch, self.run):
            raise self._refusal(published, f"its manifest says {label}")
        if label not in read_policies(self.weights, self.run):
            raise self._refusal(published, f"the history of versions lacks {label}")
        self.known.add(label)
        self.last = version

    def _refusal(self, published: PublishedWeights, why: str) -> PolicyMismatch:
        return PolicyMismatch(
            f"a message falsely says that version {published.version} of run {self.run} is "
            f"published: {why}",
            "find out which process sent it, then resume the run; no weights were adopted",
        )

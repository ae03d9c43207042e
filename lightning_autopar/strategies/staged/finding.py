"""What the parity probe found out about running a module in stages. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_autopar.strategies.staged.recording import Staging


@dataclass(frozen=True, kw_only=True)
class StagingFinding:
    """Whether and where a module's steps can be cut into stages.

    Args:
        staging: for the engine; with the reason where there are no stages.
        uncuttable: FQNs of the blocks that no stage may begin with, with the reason in a sentence.
        untried: why the stages weren't run beside the whole module when they were recorded; None where they were. Then a plan's own cuts
            are tried before it is taken (:func:`.probe.confirm_stages`).
        counted: FQNs of the buffers that a training step changes, which it would do once for each micro-batch.
    """

    staging: Staging
    uncuttable: Mapping[str, str] = field(default_factory=dict)
    untried: str | None = None
    counted: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Further sentences for whoever reads of a pipeline."""
        return () if self.untried is None else (untried_words(self.untried),)


def untried_words(reason: str) -> str:
    """That nothing was compared, and why."""
    return f"whether its stages compute the same is only checked as they run: no trial was made, as {reason}"


def refused(reason: str) -> StagingFinding:
    """That of a module that can't run in stages."""
    return StagingFinding(staging=Staging(refusal=reason))

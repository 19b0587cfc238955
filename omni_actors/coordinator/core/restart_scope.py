"""The stages of a request that run again when a replica is lost, and those that resend their input (ADR 0015)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from omni_actors.config import PipelineConfig


class StageGraph:
    """The neighbours of every stage, looked up once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self.sources = {stage.name: stage.source_names for stage in pipeline.stages}
        self.downstream = {stage.name: pipeline.downstream(stage.name) for stage in pipeline.stages}

    def again(self, stages: Collection[str], lost: Iterable[str], holds: Callable[[str], bool]) -> set[str]:
        """The stages that run again.

        These are the lost ones, all after them, and those before them whose output is gone as well.

        Args:
            stages: those of the request.
            lost: stages whose work is gone.
            holds: whether a stage's replica is alive, so that it can be asked to send its output again.
        """
        found: set[str] = set()
        look = list(lost)
        while look:
            stage = look.pop()
            if stage in found:
                continue
            found.add(stage)
            look += [after for after in self.downstream[stage] if after in stages]
            look += [before for before in self.sources[stage] if before in stages and not holds(before)]
        return found

    def feeders(self, stage: str, again: Collection[str]) -> list[str]:
        """The stages before `stage` that go on and have to send it their output from the start."""
        return [source for source in self.sources[stage] if source not in again]

    def feeds(self, stage: str, stages: Collection[str]) -> bool:
        """Whether other stages of a request take the output of this one."""
        return any(after in stages for after in self.downstream[stage])

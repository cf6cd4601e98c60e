"""What a run found, as JSON for programs: every figure, every request, and all that one must know to judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from tandem.bench.arms import Arm
from tandem.bench.plan import Sampling
from tandem.bench.session import Observation, Records
from tandem.bench.statistics import CONFIDENCE
from tandem.bench.summary import Line, never_speculated
from tandem.bench.workload import Workload

_FORMAT: Final = 1  # raised when a key changes its meaning or goes away


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What answered. `builds` are the labels of each process's info metrics; `started_with`: by --up, its options."""

    url: str
    model: Mapping[str, Any]
    status: str
    reasons: tuple[str, ...]
    builds: Mapping[str, Mapping[str, str]]
    started_with: Mapping[str, Any] | None


class Run(Protocol):
    """What a report of any kind says of the run behind it."""

    @property
    def began(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def machine(self) -> Mapping[str, Any]: ...
    @property
    def served(self) -> Served: ...
    @property
    def workload(self) -> Workload: ...
    @property
    def sampling(self) -> Sampling: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run."""

    began: str  # ISO 8601
    seconds: float
    machine: Mapping[str, Any]
    served: Served
    arms: tuple[Arm, ...]
    workload: Workload
    sampling: Sampling
    levels: tuple[int, ...]
    repeats: int
    shared_prefix: bool
    records: Records
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        return not self.records.failures

    def warnings(self) -> list[str]:
        """What makes the figures say less than they seem to."""
        warnings: list[str] = []
        silent = never_speculated(self.records, [arm.name for arm in self.arms if arm.speculates])
        if silent:
            why = f" (the gateway is {self.served.status}: {'; '.join(self.served.reasons)})" * bool(
                self.served.reasons
            )
            warnings.append(
                f"NOT ONE TOKEN WAS DRAFTED in {', '.join(silent)}{why}: its figures are those of plain decoding, "
                "and say nothing of speculation"
            )
        if self.records.stopped:
            warnings.append(
                f"{self.records.stopped} after {self.records.num_groups_done} of {self.records.num_groups} groups: "
                "the figures are of these"
            )
        smallest = min((self._size(category) for category in self.workload.categories), default=0)
        if smallest < max(self.levels):
            warnings.append(
                f"a category has {smallest} prompts, so that not {max(self.levels)} of it were asked at once: "
                "give more prompts, or a smaller --concurrency"
            )
        if not any("target" in run.cpu_seconds for run in self.records.runs):
            warnings.append(
                "no CPU time of the target: its metrics were not named (--metrics-url target=URL), or have no "
                "process_cpu_seconds_total"
            )
        return warnings

    def document(self) -> dict[str, Any]:
        """For json.dumps. Prompts and answers are not in it; a request's `prompt` is its file and line."""
        return {
            "format": _FORMAT,
            "began": self.began,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "warnings": self.warnings(),
            "machine": dict(self.machine),
            "served": asdict(self.served),
            "workload": {
                "name": self.workload.name,
                "prompts": {category: self._size(category) for category in self.workload.categories},
                "shared_prefix": self.shared_prefix,
            },
            "sampling": asdict(self.sampling),
            "concurrency": list(self.levels),
            "repeats": self.repeats,
            "confidence": CONFIDENCE,
            "arms": {arm.name: dict(arm.speculation) for arm in self.arms},
            "lines": [asdict(line) for line in self.lines],
            "groups": [asdict(run) for run in self.records.runs],
            "requests": [_request(each) for each in self.records.observations],
            "failures": [asdict(failure) for failure in self.records.failures],
        }

    def _size(self, category: str) -> int:
        return sum(prompt.category == category for prompt in self.workload.prompts)


def provenance(report: Run) -> Sequence[str]:
    """Where the figures are from, in a few lines."""
    machine, served = report.machine, report.served
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    threads = ", ".join(f"{name}={value}" for name, value in machine["threads"].items())
    up = "; ".join(f"{name} {value}" for name, value in (served.started_with or {}).items())
    builds = [f"{name}: {', '.join(f'{k} {v}' for k, v in labels.items())}" for name, labels in served.builds.items()]
    seed = "" if report.sampling.seed is None else f", seed {report.sampling.seed}"
    return [
        f"{served.model['id']} at {served.url} ({served.status})" + (f"; {up}" if up else ""),
        *(line for line in builds if not line.endswith(": ")),
        f"{len(report.workload.prompts)} prompts of {report.workload.name}, at most {report.sampling.max_tokens} "
        f"tokens, temperature {report.sampling.temperature:g}{seed}; {report.began}, {report.seconds:.0f} s",
        f"tandem {machine['tandem']}, commit {machine['commit'] or 'unknown'}; {machine['cpu']}, "
        f"{machine['cpus_usable']} of {machine['cpus']} CPUs, {machine['memory_bytes'] / 2**30:.1f} GiB, "
        f"load {machine['load_average']:g} before; {machine['os']}",
        f"on this side: Python {machine['python']}, {packages}" + (f"; {threads}" if threads else ""),
    ]


def _request(each: Observation) -> dict[str, Any]:
    timeline = asdict(each.timeline)
    del timeline["text"], timeline["rounds"]
    gaps = timeline.pop("gap_seconds")
    speculation = timeline.pop("speculation")
    return {
        **{name: value for name, value in asdict(each).items() if name != "timeline"},
        **timeline,
        "longest_gap_seconds": max(gaps, default=None),
        "speculation": speculation,
    }

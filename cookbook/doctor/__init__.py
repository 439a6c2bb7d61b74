"""Is this machine ready? Looks at what a run would need before one is started, and measures what can be measured.

Every check is a function that yields findings, and runs in a process of its own with a limit (`probe`): first those
that only look, side by side, then one after the other those that measure, for they would disturb one another.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cookbook import simulated_gpus
from cookbook.doctor import probe
from cookbook.doctor.collective import check_collective
from cookbook.doctor.environment import check_variables, hidden_gpus
from cookbook.doctor.finding import EXIT_CODES, Finding, failure, warning, worst
from cookbook.doctor.gpus import (
    check_gpus,
    check_links,
    check_needs,
    find_link,
    parse_matrix,
    parse_nvlink,
    read_gpus,
    try_torch,
)
from cookbook.doctor.host import check_cpu, check_disk, check_files, check_memory, check_shared_memory, read_limits
from cookbook.doctor.hub import check_hub_for
from cookbook.doctor.nvme import check_nvme, nvme_folders
from cookbook.doctor.sizes import sizes
from cookbook.doctor.software import check_build, check_python, check_torch_build, check_versions
from cookbook.files import RecipeError
from cookbook.gpus import VARIABLE, parse_gpus, unnamed_gpus, visible_gpus
from cookbook.library import read_label, read_needs
from cookbook.machine import CPU_PROCESSES, torch_cuda
from cookbook.recipe import Recipe
from cookbook.strategy import Strategy

DEADLINE_SECONDS = 60.0
LEAST_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""For a check that only looks; nvidia-smi on eight GPUs takes a few."""
HUB_SECONDS = 25.0
"""For several questions, each with a limit of its own."""
DISK_SECONDS = 20.0
TORCH_SECONDS = 30.0
"""For torch to be imported and to compute a little on every GPU."""
KEEP_SECONDS = 1.5
"""Before the deadline, for what is left to be killed and told."""
COLOURS = {"ok": "32", "warning": "33", "failure": "31"}


@dataclass
class _Visit:
    """One run of the doctor."""

    folder: Path
    until: float
    """When the last probe must have ended, on the clock of time.monotonic."""
    findings: list[Finding] = field(default_factory=list)
    probes: list[probe.Probe] = field(default_factory=list)

    def begin(self, name: str, check: Callable[[], Iterable[Any]], seconds: float = LOOK_SECONDS) -> probe.Probe:
        started = probe.start(name, check, seconds)
        self.probes.append(started)
        return started

    def tell(self, *probes: probe.Probe) -> None:
        """Waits for probes, and notes what they have found in this order."""
        probe.finish(list(probes), self.until)
        for one in probes:
            self.findings += [Finding(**said) for said in one.said]
            self.findings += _trouble(one)

    def left(self) -> float:
        return self.until - time.monotonic()


def examine(
    recipe: Recipe | None, strategy: Strategy | None, path: Path | None = None, deadline: float = DEADLINE_SECONDS
) -> list[Finding]:
    """All findings about this machine, for a recipe and its strategy if they are given. Ends before the deadline.

    Args:
        path: of the recipe, whose label says what it needs.
        deadline: in seconds from now.

    Raises:
        RecipeError: a deadline in which nothing could be learned.
    """
    if not deadline >= LEAST_SECONDS:
        raise RecipeError([f"--deadline is {deadline:g}; write at least {LEAST_SECONDS:g} seconds"])
    begun = time.monotonic()
    with (
        _signals_end_this(),
        tempfile.TemporaryDirectory(prefix="cookbook-doctor-", ignore_cleanup_errors=True) as name,
    ):
        visit = _Visit(folder=Path(name), until=begun + deadline - KEEP_SECONDS)
        try:
            _examine(visit, recipe, strategy, path)
        finally:
            for one in visit.probes:
                probe.end(one)
    return visit.findings


def _examine(visit: _Visit, recipe: Recipe | None, strategy: Strategy | None, path: Path | None) -> None:
    precision = recipe.mixed_precision if recipe else "bf16"
    folders = nvme_folders(strategy) if strategy else []
    hub = visit.begin("Hub", as_said(check_hub_for, recipe), HUB_SECONDS)  # meanwhile
    asking = visit.begin("GPUs", read_gpus)
    first = [
        visit.begin("software", as_said(check_python)),
        visit.begin("versions", as_said(check_versions)),
        visit.begin("environment", as_said(check_variables, strategy, precision)),
    ]
    probe.finish([asking], visit.until)
    said: dict[str, str] = {name: text for piece in asking.said for name, text in piece.items()}
    gpus = parse_gpus(said.get("gpus", "")) or unnamed_gpus()
    run_gpus = visible_gpus(gpus)
    used = len(run_gpus)
    build = visit.begin("build", as_said(check_build, bool(folders), bool(used), visit.folder))
    visit.tell(*first)
    visit.findings += _trouble(asking)
    if not asking.trouble and said:
        visit.findings += check_gpus(said)
    if path is not None:
        visit.findings += check_needs(read_needs(read_label(path)), run_gpus, used, str(path))
    visit.findings += hidden_gpus(os.environ.get(VARIABLE), used, len(gpus)) if gpus else []
    visit.findings += check_torch_build(len(gpus), gpus[0].driver or None if gpus else None)
    visit.findings += check_links(said)
    on_gpus = bool(used) and _torch_has_cuda()
    if on_gpus:
        visit.tell(visit.begin("torch", as_said(try_torch, precision), TORCH_SECONDS))
    processes = used or CPU_PROCESSES
    needs = sizes(recipe, strategy, processes, on_gpus=bool(used)) if recipe and strategy else None
    offloads = strategy is not None and "cpu" in (strategy.offload_optimizer, strategy.offload_param)
    limits = read_limits(Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else "")
    host = [
        visit.begin("CPU", as_said(check_cpu, processes, limits, offloads)),
        visit.begin("memory", as_said(check_memory, limits, needs)),
        visit.begin("shm", as_said(check_shared_memory, used)),
        visit.begin("files", as_said(check_files)),
    ]
    if recipe is not None:
        host.append(visit.begin("disk", as_said(check_disk, Path(recipe.run.output_dir), needs)))
    visit.tell(*host, build)
    for folder in folders:
        assert strategy is not None
        visit.tell(visit.begin("NVMe", as_said(check_nvme, folder, strategy, needs), DISK_SECONDS))
    if visit.left() < 1:
        says = "not tried: the other checks took all the time"
        visit.findings.append(warning("collective", says, "--deadline 120"))
    elif not used or on_gpus:
        link = find_link(run_gpus, parse_matrix(said.get("topology", "")), parse_nvlink(said.get("nvlink", "")))
        seconds = visit.left()
        check = partial(check_collective, processes, "nccl" if on_gpus else "gloo", link, visit.folder, seconds - 0.5)
        visit.tell(visit.begin("collective", as_said(check), seconds))
    visit.tell(hub)


def as_said(check: Callable[..., Iterable[Finding]], *arguments: Any) -> Callable[[], Iterator[dict[str, str]]]:
    """A check with its arguments, as a probe runs it."""

    def produce() -> Iterator[dict[str, str]]:
        for finding in check(*arguments):
            yield asdict(finding)

    return produce


def _trouble(one: probe.Probe) -> list[Finding]:
    """What a probe could not say by itself."""
    if one.ended == "out of time":
        reached = time.monotonic() >= one.limit
        if reached:
            says = f"no answer within {one.seconds:.0f} s: what it asks hangs (driver, file system, network)"
            return [failure(one.name, says, "dmesg | tail, and ps -eo state,pid,cmd | grep ^D")]
        return [warning(one.name, "not finished before the deadline", "--deadline 120")]
    if one.trouble:
        return [warning(one.name, f"could not be checked: {one.trouble}", "please report this")]
    return []


def _torch_has_cuda() -> bool:
    try:
        return simulated_gpus.is_active() or torch_cuda() is not None
    except ImportError:
        return False


@contextmanager
def _signals_end_this() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that probes and the temporary folder go."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def in_words(findings: list[Finding], seconds: float, *, colour: bool, width: int) -> str:
    """A line for each finding, its remedy below it, and a last line for all."""
    name_width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        status = f"{finding.status:7}"
        if colour:
            status = f"\x1b[{COLOURS[finding.status]}m{status}\x1b[0m"
        margin = " " * (7 + 2 + name_width + 2)
        said = textwrap.wrap(finding.says, width - len(margin), break_long_words=False, break_on_hyphens=False)
        lines.append(f"{status}  {finding.check:{name_width}}  {said[0]}")
        lines += [margin + line for line in said[1:]]
        if finding.status != "ok":
            lines.append(f"{margin}-> {finding.remedy}")  # in one line, to be copied
    counts = {status: sum(finding.status == status for finding in findings) for status in ("failure", "warning")}
    words = [f"{count} {status}{'s' if count > 1 else ''}" for status, count in counts.items() if count]
    verdict = "not ready" if counts["failure"] else "ready"
    lines.append(f"{verdict}: {', '.join(words) or 'nothing to mend'} ({seconds:.1f} s)")
    return "\n".join(lines)


def report(findings: list[Finding], seconds: float, *, as_json: bool) -> int:
    """Prints the findings. Returns the exit code: 0 ready, 1 ready with warnings, 2 not ready."""
    code = EXIT_CODES[worst(findings)]
    if as_json:
        listed = [asdict(finding) for finding in findings]
        print(json.dumps({"ready": code < 2, "seconds": round(seconds, 1), "findings": listed}, indent=1))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        print(in_words(findings, seconds, colour=colour, width=max(60, width)))
    return code

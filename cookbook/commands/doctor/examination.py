"""Is this machine ready? Looks at what a run would need, before one is started.

Every check is a function that yields findings, and runs beside others in a process of its own with a limit (`probe`).
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import simulated_gpus
from cookbook.commands.doctor import probe
from cookbook.commands.doctor.driver import check_gpus, check_links, check_needs, try_allocator, try_torch
from cookbook.commands.doctor.environment import check_variables, hidden_gpus
from cookbook.commands.doctor.finding import EXIT_CODES, Finding, failure, warning
from cookbook.commands.doctor.host import (
    check_cpu,
    check_disk,
    check_files,
    check_memory,
    check_shared_memory,
    read_limits,
)
from cookbook.commands.doctor.hub import check_hub, repos_of
from cookbook.commands.doctor.nvme import check_nvme, nvme_folders
from cookbook.commands.doctor.software import check_build, check_python, check_torch_build, check_versions
from cookbook.commands.doctor.storage import sizes
from cookbook.commands.shared.answer_forms import DoctorAnswer, FindingForPrograms
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.system.console import Row, colour, page, say, several
from cookbook.system.files import RecipeError
from cookbook.system.gpus import VARIABLE, Driver, read_driver, unnamed_gpus, visible_gpus
from cookbook.system.machine import CPU_PROCESSES, fp8_problems, torch_cuda

DEADLINE_SECONDS = 60.0
LEAST_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""For a check that only looks; the driver of eight GPUs takes a few to answer."""
HUB_SECONDS = 25.0
"""For several questions, each with a limit of its own."""
TORCH_SECONDS = 30.0
"""For torch to be imported and to compute a little on every GPU."""
KEEP_SECONDS = 1.5
"""Seconds before the deadline in which what is left is killed and reported."""
COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@dataclass
class _Visit:
    """One run of the doctor."""

    folder: Path
    until: float
    """When the last probe must have ended, on the clock of time.monotonic."""
    findings: list[Finding] = field(default_factory=list)
    probes: list[probe.Probe] = field(default_factory=list)

    def begin(
        self, name: str, check: Callable[..., Iterable[Finding]], *arguments: Any, seconds: float = LOOK_SECONDS
    ) -> probe.Probe:
        self.probes.append(probe.start(name, lambda: map(asdict, check(*arguments)), seconds))
        return self.probes[-1]

    def tell(self, *probes: probe.Probe) -> None:
        """Waits for probes, and notes what they have found in this order."""
        probe.finish(list(probes), self.until)
        for process in probes:
            self.findings += [Finding(**finding) for finding in process.said]
            self.findings += _trouble(process)

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
        raise RecipeError(f"--deadline is {deadline:g}; write at least {LEAST_SECONDS:g} seconds")
    begun = time.monotonic()
    with (
        _hanging_up_ends_this(),
        tempfile.TemporaryDirectory(prefix="cookbook-doctor-", ignore_cleanup_errors=True) as name,
    ):
        visit = _Visit(folder=Path(name), until=begun + deadline - KEEP_SECONDS)
        try:
            _examine(visit, recipe, strategy, path)
        finally:
            for process in visit.probes:
                probe.end(process)
    return visit.findings


def _examine(visit: _Visit, recipe: Recipe | None, strategy: Strategy | None, path: Path | None) -> None:
    precision = recipe.mixed_precision if recipe else "bf16"
    folders = nvme_folders(strategy) if strategy else []
    hub = visit.begin("Hub", lambda: check_hub(repos_of(recipe)), seconds=HUB_SECONDS)  # meanwhile
    first = [
        visit.begin("software", check_python),
        visit.begin("versions", check_versions),
        visit.begin("environment", check_variables, strategy, precision),
    ]
    driver, findings = _ask_driver(min(LOOK_SECONDS, visit.left()))
    gpus = driver.gpus
    run_gpus = visible_gpus(gpus)
    used = len(run_gpus)
    build = visit.begin("build", check_build, bool(folders), bool(used), visit.folder)
    visit.tell(*first)
    visit.findings += findings
    if path is not None:
        visit.findings += check_needs(read_needs(read_label(path)), run_gpus, used, str(path))
    if used and precision == "fp8":
        visit.findings += [failure("fp8", what, remedy) for what, remedy in fp8_problems(run_gpus)]
    visit.findings += hidden_gpus(os.environ.get(VARIABLE), used, len(gpus)) if gpus else []
    visit.findings += check_torch_build(len(gpus), gpus[0].driver or None if gpus else None)
    visit.findings += check_links(driver)
    on_gpus = False
    with suppress(ImportError):  # without torch
        on_gpus = bool(used) and (simulated_gpus.is_active() or torch_cuda() is not None)
    if on_gpus:
        computing = visit.begin("torch", try_torch, precision, seconds=TORCH_SECONDS)
        visit.tell(computing, visit.begin("allocator", try_allocator, seconds=TORCH_SECONDS))
    processes = used or CPU_PROCESSES
    needs = sizes(recipe, strategy, processes, on_gpus=bool(used)) if recipe and strategy else None
    offloads = strategy is not None and "cpu" in (strategy.offload_optimizer, strategy.offload_param)
    limits = read_limits(
        Path("/proc/self/cgroup").read_text(encoding="utf-8") if Path("/proc/self/cgroup").exists() else ""
    )
    host = [
        visit.begin("CPU", check_cpu, processes, limits, offloads),
        visit.begin("memory", check_memory, limits, needs),
        visit.begin("shm", check_shared_memory, used),
        visit.begin("files", check_files),
    ]
    if recipe is not None:
        host.append(visit.begin("disk", check_disk, Path(recipe.run.output_dir), needs))
    visit.tell(*host, build)
    for folder in folders:
        assert strategy is not None
        visit.tell(visit.begin("NVMe", check_nvme, folder, strategy, needs))
    visit.tell(hub)


def _ask_driver(seconds: float) -> tuple[Driver, list[Finding]]:
    try:
        driver = read_driver(seconds)
    except RecipeError as error:
        remedy = "dmesg | tail, and ps -eo state,pid,cmd | grep ^D; if it is only slow, --deadline 120"
        return Driver(gpus=unnamed_gpus()), [failure("GPUs", str(error), remedy)]
    return driver, list(check_gpus(driver))


def _trouble(process: probe.Probe) -> list[Finding]:
    """Findings about a probe that broke or did not finish."""
    if process.ended == "out of time":
        if time.monotonic() >= process.limit:
            text = f"no answer within {process.seconds:.0f} s: what it asks hangs (driver, file system, network)"
            return [failure(process.name, text, "dmesg | tail, and ps -eo state,pid,cmd | grep ^D")]
        return [warning(process.name, "not finished before the deadline", "--deadline 120")]
    if process.trouble:
        return [warning(process.name, f"could not be checked: {process.trouble}", "please report this")]
    return []


@contextmanager
def _hanging_up_ends_this() -> Iterator[None]:
    """A closed terminal (SIGHUP) unwinds as SIGTERM does, so that probes and the temporary folder go."""
    earlier = signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, earlier)


def in_words(findings: list[Finding], seconds: float) -> str:
    """A line for each finding, its remedy below it, and a last line for all."""
    margin = " " * (len("warning") + 2 + max(len(finding.check) for finding in findings) + 2)
    rows: list[Row] = []
    for finding in findings:
        rows.append((colour(finding.status, COLOURS[finding.status]), finding.check, finding.text))
        if finding.status != "ok":
            rows.append(f"{margin}-> {finding.remedy}")  # in one line, to be copied
    statuses = [finding.status for finding in findings]
    counts = [(statuses.count(status), status) for status in ("failure", "warning") if status in statuses]
    words = [several(count, status) for count, status in counts]
    verdict = "not ready" if "failure" in statuses else "ready"
    return page(*rows, f"{verdict}: {', '.join(words) or 'nothing to fix'} ({seconds:.1f} s)", indent=0)


def report(findings: list[Finding], seconds: float, *, as_json: bool) -> int:
    """Prints the findings. Returns the exit code: 0 ready, 1 ready with warnings, 2 not ready."""
    code = max((EXIT_CODES[finding.status] for finding in findings), default=0)
    if as_json:
        listed = [FindingForPrograms(**asdict(finding)) for finding in findings]
        answer(DoctorAnswer(ready=code < 2, seconds=round(seconds, 1), findings=listed))
    else:
        say(in_words(findings, seconds), is_coloured=True)
    return code

"""Fixtures that tests share: a command line in a folder of its own, and real data where they are."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from hypothesis import settings

from experiments.__main__ import main
from experiments.launch import local
from tests.slurm.devcluster import SLURMS, slurm_of
from tests.slurm.devcluster import clusters as clusters
from tests.slurm.devcluster import devcluster as devcluster
from tests.slurm.devcluster import each_slurm as each_slurm

# Torch reads these when it is imported. The tests' tensors are small, and each process of pytest-xdist has a
# core of its own.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

# Where Python is told to keep nothing that it compiles, each of a thousand processes compiles our code anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent.parent
THE_USERS = ("DATA_ROOT", "FORCE", "SPARSIFY_CONF", "SPARSIFY_RESULTS")  # settings that no test is to see
T = TypeVar("T")
Command = Callable[..., "subprocess.CompletedProcess[str]"]


# Files whose tests share something of which there is one: the same process of pytest-xdist runs them all, and
# those of any file that makes something once for all of its tests. (--dist=loadgroup loses its groups with
# pytest 9.2: its issue 1386.)
TOGETHER = {
    "tests/sparsify/comm/test_horovod.py": "Horovod",
    "tests/sparsify/test_gpu.py": "GPU",
    "tests/sparsify/kernels/test_gpu_kernels.py": "GPU",
    "tests/bench/test_select.py": "benchmark",
}
QUICK_S = 1.0  # an extended test that takes less belongs into the tier that is always run
SYSTEMS = ("slurm", "horovod", "gpu")  # markers of tests that need one
MADE_ONCE = re.compile(r"scope=.(module|session)")
PROCESS_BYTES = 2 * 10**9  # of a process of tests and what it starts
MEMORY = Path("/dev/shm")  # a folder in memory, of most Linux systems
# The same inputs on each run, unless others are asked for (HYPOTHESIS_PROFILE=nightly).
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
MEMORY_BYTES = 4 * 10**9  # that all tests leave there at most


@pytest.fixture(autouse=True)
def rules_are_registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented records count as begun under the rules of today, but where registering is what is tested."""
    from analysis.evidence import ClaimEvidence

    if request.node.get_closest_marker("registering") is None:
        monkeypatch.setattr(ClaimEvidence, "has_rule_registered", lambda *_: True)


@pytest.fixture(autouse=True)
def workers_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers begin from a process that has loaded torch, but where starting them is what is tested."""
    if request.node.get_closest_marker("own_processes") is None:
        monkeypatch.setattr(local, "can_fork_workers", lambda *_: True)


@pytest.fixture(autouse=True)
def others_may_emulate_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of tests emulate links beside measurements; no test checks what they find of links."""
    monkeypatch.setattr(local, "EMULATION", f"emulation-of-tests-{os.getpid()}")


@pytest.fixture
def one_launch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let invented times of one launch decide: what is tested is the quantity."""
    from analysis import claims, stats
    from analysis.records.steps import BLOCKS, LAUNCHES

    for kind in (BLOCKS, LAUNCHES):
        monkeypatch.setitem(stats.ENOUGH_SAMPLES, kind, 1)
    monkeypatch.setattr(claims, "ENOUGH_OCCASIONS", 0)


def pytest_configure() -> None:
    take_signals()
    if in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def in_memory() -> bool:
    """Return whether `tmp_path` may lie in memory.

    What a test writes is synced to the disk as what users compute is, and beside other programs that write,
    one sync takes seconds.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return False
    found = os.statvfs(MEMORY)
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize > MEMORY_BYTES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--method", help="only tests of one method: those that have its name as a parameter")
    parser.addoption("--folders", action="store_true", help="print the seconds of each folder of tests")
    parser.addoption("--must-run", help="fail if a test is skipped for a reason that this pattern finds")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests: those that take longest first, or in an order drawn from $SHUFFLE.

    The seed is printed; all processes of pytest-xdist draw the same order. Tests of a file stay together, for
    what a file makes once would be made again and again.
    """
    for item in items:
        if any(item.get_closest_marker(system) for system in SYSTEMS):
            item.add_marker("extended")
    if method := config.getoption("--method"):
        others = [item for item in items if parameters(item).get("name") != method]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if seed := os.environ.get("SHUFFLE"):
        print(f"SHUFFLE={seed}")
        draw = random.Random(seed).random
        places = {item.path: draw() for item in items}
        items.sort(key=lambda item: (places[item.path], draw()))
    else:
        items.sort(key=lambda item: rank(group_of(item.nodeid)))


def pytest_collection_finish() -> None:
    """Nobody looks for garbage in what is loaded by now: most of it stays to the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped that was to run."""
    if not hasattr(session.config, "workerinput") and skipped_wrongly(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print where the time went, and which tests are in the wrong tier."""
    for line in skipped_wrongly(config):
        terminalreporter.write_line(f"--must-run: {line}", red=True)
    if not config.getoption("--folders"):
        return
    seconds_by_folder = Counter[str]()
    tests_by_folder = Counter[str]()
    seconds_by_test = Counter[str]()
    quick = set[str]()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        folder = str(Path(report.fspath).parent)
        seconds_by_folder[folder] += report.duration
        seconds_by_test[report.nodeid] += report.duration
        tests_by_folder[folder] += report.when == "call"
        if "extended" in report.keywords and not any(system in report.keywords for system in SYSTEMS):
            quick.add(report.nodeid)
    terminalreporter.section("seconds of one process, by folder")
    for folder, seconds in sorted(seconds_by_folder.items()):
        terminalreporter.write_line(f"{seconds:8.1f} s {tests_by_folder[folder]:6} tests  {folder}")
    quick = {nodeid for nodeid in quick if seconds_by_test[nodeid] < QUICK_S}
    for nodeid in sorted(quick):
        terminalreporter.write_line(f"extended, but takes {seconds_by_test[nodeid]:.2f} s: {nodeid}")


def skipped_wrongly(config: pytest.Config) -> list[str]:
    """Return where tests were skipped for a reason that --must-run names, with the reasons."""
    pattern = config.getoption("--must-run")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not pattern or reporter is None:
        return []
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}
    return sorted(reason for reason in reasons if re.search(pattern, reason))


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test, by name."""
    found: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return found


def rank(group: str) -> int:
    """Return the rank of a group: clusters, other shared resources, whole files, then single tests."""
    kinds = (group in SLURMS, group in TOGETHER.values(), "::" not in group, True)
    return kinds.index(True)


def take_signals() -> None:
    """Let signals act as in a terminal, also where a script or `nohup` has them ignored."""
    for number, how in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, how)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run two processes a core: for half of their time tests wait, for SLURM and for what they started."""
    fit = psutil.virtual_memory().available // PROCESS_BYTES
    return max(1, min(2 * (os.cpu_count() or 1), fit))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give groups to the process that is free first, in the order of their tests."""
    from xdist.scheduler import LoadScopeScheduling

    class TogetherOrApart(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return TogetherOrApart(config, log)


def group_of(nodeid: str) -> str:
    """Return the resource that the test shares with others, or the test's own name."""
    file = nodeid.partition("::")[0]
    text = text_of(file)
    if "pytest.mark.slurm" in text:
        return slurm_of(text, nodeid)
    return TOGETHER.get(file) or (file if MADE_ONCE.search(text) else nodeid)


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def environment_for(results: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a command under test, without CIFAR-10; its results go to `results`."""
    clean = {name: value for name, value in os.environ.items() if name not in THE_USERS}
    return {**clean, "SPARSIFY_RESULTS": str(results), "PYTHONWARNINGS": "error::ResourceWarning", **extra}


def process(
    *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a program; return its output and its exit code."""
    return subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def python(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python of its own; return its output and its exit code."""
    return process(sys.executable, *words, **how)


def loaded_by(code: str) -> set[str]:
    """Return the modules that a process of its own has loaded after this code."""
    done = python("-c", f"import sys; {code}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that runs `python -m experiments ...` and returns its output and exit code."""

    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "experiments", *words, env=environment_for(tmp_path / "results", **extra))

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `experiments` within this process, which saves starting one.

    Workers are processes all the same.
    """
    for name in THE_USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path / "results"))

    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            try:
                code = main(words)
            except SystemExit as ended:
                code = int(ended.code or 0)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return run


@pytest.fixture
def cifar10_root() -> Path:
    """Return the folder of a real CIFAR-10."""
    root = os.environ.get("DATA_ROOT")
    if not root or not (Path(root) / "cifar-10-batches-py").is_dir():
        pytest.skip("CIFAR-10 was not found: set DATA_ROOT")
    return Path(root)


def fine(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Check that a command ended well, and return it."""
    assert done.returncode == 0, done.stderr
    return done


def there(value: T | None) -> T:
    """Check that the value is not None, and return it."""
    assert value is not None
    return value


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """Check that a command ended with `code` and a sentence that contains all `words`, without traceback."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr, (word, done.stderr)

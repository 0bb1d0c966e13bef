"""Which runs a command means, what each needs before it can start, and which have a record already.

Without torch or pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path

from analysis.records.configs import configs_by_variant, run_id
from analysis.records.store import Attempt
from experiments.config import choices, code_version, compose, dataset_files
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import EmulatedCluster, SlurmCluster
from experiments.config.run import Run
from slurm.gpus import has_gpu
from sparsify.ranges import describe_unknown

MAX_NAMED_FILES = 3  # files in a sentence
MEASURE_AGAIN = "--force measures again"


@dataclass(frozen=True)
class PlannedRun:
    """A run to be made."""

    config: Config
    data_root: Path | None  # the folder of its data set; None where that needs no files
    # Of the rules of claims that are registered with the run, by the claims' ids.
    rule_digest_by_claim: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_timing(self) -> bool:
        """Tell whether it is made for its step times, so that nothing else may run at the same time.

        A run that validates every epoch is made for its learning curve, but over an emulated link, which
        other runs would slow down, for when it gets there.
        """
        config = self.config
        is_curve = config.train.validate == "epoch" and not isinstance(config.cluster, EmulatedCluster)
        return not is_curve or config.timing.mode == "as_published"

    @property
    def num_cores(self) -> int:
        """Cores of this machine that it takes."""
        return self.config.num_processes * self.config.threads

    @property
    def gpu_share(self) -> Fraction:
        """Share of this machine's GPUs that the run takes.

        Timed runs, and runs of several processes, take all.
        """
        if self.config.device == "cpu":
            return Fraction(0)
        shares = not self.is_timing and self.config.num_processes == 1
        return Fraction(1, self.config.launch.runs_per_gpu if shares else 1)


def default_profile(cluster: str | None) -> str:
    """Return paper where there is a GPU, here or on the cluster that is chosen, else laptop."""
    if cluster is not None:
        settings = compose.resolve({"cluster": cluster}).cluster
        if isinstance(settings, SlurmCluster):
            return "laptop" if settings.gpu == "none" else "paper"
    return "paper" if has_gpu() else "laptop"


def requested_or_default_profile(request: Run | Sequence[str]) -> str:
    """Return the profile that a run or words ask for, else this machine's default.

    Words may give other settings several values.
    """
    words = [] if isinstance(request, Run) else [word.partition("=") for word in request]
    settings = request.settings if isinstance(request, Run) else {key: text for key, _, text in words}
    profile = str(settings["profile"]) if "profile" in settings else default_profile(settings.get("cluster"))
    if profile not in choices.option_names("profile"):
        raise ValueError(describe_unknown("profile", profile, choices.option_names("profile")))
    return profile


def plan_distinct_runs_and_ensure_data(
    configs: Sequence[Config], say: Callable[[str], None]
) -> list[PlannedRun]:
    """Return the runs of these configurations, each once, with their data sets.

    A missing data set is downloaded, or the configuration is replaced by one with another data set.

    Raises:
        ValueError: no data, or no GPU.
    """
    local_configs = [config for config in configs if not isinstance(config.cluster, SlurmCluster)]
    gpu_configs = [config for config in local_configs if config.device == "cuda"]
    if gpu_configs and not has_gpu():
        choice = "device=cuda"
        instead = "device=cpu"
        if gpu_configs[0].profile == "paper":
            choice = "profile=paper (device=cuda)"
            instead = "profile=laptop"
        raise ValueError(f"{choice} needs an NVIDIA GPU, and there is none; take {instead}")
    say_once = cache(say)
    distinct = {run_id(config): config for config in configs}
    return [PlannedRun(*dataset_files.ensure_dataset(config, say_once)) for config in distinct.values()]


def find_unmeasured_runs(
    planned: Sequence[PlannedRun],
    folders: ResultFolders,
    say: Callable[[str], None],
    remedy: str = MEASURE_AGAIN,
) -> list[PlannedRun]:
    """Return the runs without a valid attempt.

    Says which attempts are damaged, and which were made with other code.

    Args:
        planned: the runs.
        folders: of results.
        say: what is called with a sentence.
        remedy: what becomes of attempts that were made with other code.
    """
    ids = dict.fromkeys(run_id(run.config) for run in planned)
    attempts, notes = folders.store.find_newest_valid(ids)
    for note in notes:
        say(note)
    sentence = describe_code_changes(attempts, remedy)
    if sentence:
        say(sentence)
    measured_ids = {attempt.run_id for attempt in attempts}
    return [run for run in planned if run_id(run.config) not in measured_ids]


def describe_code_changes(attempts: Iterable[Attempt], remedy: str = MEASURE_AGAIN) -> str:
    """Return a sentence on the attempts that were made with other code; empty where none was."""
    files_by_attempt = {attempt: changed_code_files(attempt) for attempt in attempts}
    names = [attempt.run_id for attempt, files in files_by_attempt.items() if files]
    if not names:
        return ""
    files = sorted({file for files in files_by_attempt.values() for file in files})
    subject = names[0] if len(names) == 1 else f"{len(names)} runs"
    return f"{subject}: {explain_changed_files(files, remedy)}"


def explain_changed_files(files: Sequence[str], remedy: str = MEASURE_AGAIN) -> str:
    """Return a sentence on a run's measuring files that have changed since, and how to measure again."""
    named_files = ", ".join(files[:MAX_NAMED_FILES]) + (
        f" and {len(files) - MAX_NAMED_FILES} more" if len(files) > MAX_NAMED_FILES else ""
    )
    return f"measured with other code ({named_files}); {remedy}"


def changed_code_files(attempt: Attempt) -> list[str]:
    """Return the files that an attempt's numbers rest on and that have changed since.

    Older records do not say.
    """
    config = attempt.config
    methods = {variant["method"]["name"] for variant in (config, *configs_by_variant(config).values())}
    task = config["task"]["name"]
    # A data set that is not found is replaced by the digits.
    return code_version.changed_measuring_files(
        attempt.manifest.get("sources", {}), {*methods, task, dataset_files.dataset_of_task(task), "digits"}
    )

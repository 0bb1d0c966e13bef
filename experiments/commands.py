"""What each command does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from analysis import compare
from analysis.records import Attempt, read_json, read_lines
from experiments import config as configs
from experiments import figures, sweeping
from experiments.launch import RunFailed
from experiments.making import make_all
from experiments.planning import Folders, profile_of, provide
from experiments.tasks import REGISTRY as TASKS
from slurm import environment
from sparsify.methods import REGISTRY as METHODS

LOG_LINES = 15  # of a failed worker's log that `why` shows


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(words: list[str], options: set[str]) -> int:
    """One run, recorded; prints where."""
    folders = Folders()
    profile = profile_of(words)
    words = [word for word in words if not word.startswith("profile=")] + [f"profile={profile}"]
    if (group := environment.joined()) is not None:
        from experiments.joined import carry_out_here  # torch comes with it

        attempt = carry_out_here(configs.resolve(words), group, folders, say, _forced(options))
        if group.place.rank == 0:
            print(_summary(attempt))
        return 0
    planned = provide([configs.resolve(words)], say)
    attempt = folders.store.valid(planned[0].config)
    if attempt is not None and not _forced(options):
        say("already measured; --force measures again")
    else:
        _make(lambda: make_all(planned, folders, "run", words, say, _forced(options)))
        attempt = folders.store.valid(planned[0].config)
    if attempt is None:
        return 1
    print(_summary(attempt))
    return 0


def reproduce_(words: list[str], options: set[str]) -> int:
    """Figures of a paper: their missing runs, pictures and verdicts."""
    from experiments.reproduce import reproduce  # pandas and matplotlib come with it

    items = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not items:
        raise ValueError(f"reproduce what? There are: {', '.join(figures.items())}")
    for item in items:
        figures.check(item)
    drawn = [
        _make(lambda item=item: reproduce(item, overrides, Folders(), say, _forced(options)))
        for item in items
    ]
    for one in drawn:
        print(f"\n{one.table}\n\n{one.item}: {one.picture}")
    return 0


def figures_(words: list[str], options: set[str]) -> int:
    """Every figure again from stored records, this checkout's first, else those that the repository ships."""
    from experiments.figures import select
    from experiments.reproduce import redraw_all

    folders = Folders()
    items = [word for word in words if word != "select"]  # drawn from a benchmark's records, not from runs
    for item in items:
        figures.check(item)
    drawn = redraw_all(folders, items or ([] if words else list(figures.items())))
    for one in drawn:
        print(f"{one.picture} (from {one.source})")
    benched = select.redraw(folders) if not words or "select" in words else []
    for picture in benched:
        print(picture)
    if not drawn and not benched:
        say("no stored records suffice for any figure; make some with `make reproduce-fig4`")
        return 1
    return 0


def collect(words: list[str], options: set[str]) -> int:
    """All valid runs into Parquet tables: runs, steps, epochs, spans."""
    from experiments.shipping import consolidate, ship

    if words:
        raise ValueError(f"collect takes no words, got {' '.join(words)}")
    folders = Folders()
    for line in consolidate(folders):
        print(line)
    if "--ship" in options:
        for line in ship(folders):
            print(line)
    return 0


def why(words: list[str], options: set[str]) -> int:
    """What a run did; for a failed one the reason and the end of its workers' logs. `--against RUN` compares
    where two runs were measured."""
    folders = Folders()
    if "--against" in options:
        if len(words) != 2:
            raise ValueError("why RUN --against RUN takes two runs")
        both = [sweeping.the_run([word], folders) for word in words]
        found = compare.compare(*({**one.manifest, "config": one.config} for one in both))
        print(compare.text(found, *(one.run_id for one in both)))
        return 0
    newest = sweeping.the_run(words, folders)
    for attempt in folders.store.attempts(newest.run_id):
        print(_summary(attempt))
        for log in sweeping.log_files(attempt, folders):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            if lines:
                print(f"  {log.name}:", *lines, sep="\n    ")
    return 0


COMMANDS: dict[str, Callable[[list[str], set[str]], int]] = {
    "run": run,
    "reproduce": reproduce_,
    "plan": sweeping.plan,
    "submit": sweeping.submit,
    "sweep": sweeping.sweep,
    "status": sweeping.status,
    "logs": sweeping.logs,
    "why": why,
    "cancel": sweeping.cancel,
    "collect": collect,
    "figures": figures_,
}


# These start workers; to begin a run together is what `run` does.
ALONE = ("reproduce", "submit", "sweep")


def carry_out(command: str, words: list[str], options: set[str]) -> int:
    """The exit code of a command.

    Raises:
        ValueError: several processes were given a command that is for one.
    """
    if command in ALONE and (group := environment.joined()) is not None:
        raise ValueError(
            f"{group.starter} started {group.place.size} processes, and {command} starts its workers itself: "
            f"call it without {group.starter}, or make a single run with `run`"
        )
    return COMMANDS[command](words, options)


def explain(command: str) -> str:
    """The help of one command: what it does and every word it takes."""
    text = f"{command}: {COMMANDS[command].__doc__}\n"
    if command in ("reproduce", "figures", "plan", "submit"):
        text += f"\nitems: {', '.join(figures.items())}\n"
    if command in ("run", "reproduce", "plan", "submit", "sweep"):
        text += "\nchoices (group=option):\n"
        for group in configs.GROUPS:
            text += f"  {group:9} {', '.join(configs.options(group))}\n"
        text += "\nleaves (key=value), with the defaults of a bare `run`:\n"
        config = configs.resolve([])
        known = {name: configs.leaf(config, name) for name in configs.leaves(config)}
        text += "".join(f"  {name}={_word(value)}\n" for name, value in known.items())
        text += "\nhyperparameters:\n"
        for registry in (METHODS, TASKS):
            for name in registry.names():
                values = " ".join(f"{key}={_word(value)}" for key, value in registry.defaults(name).items())
                text += f"  {registry.noun}={name}: {registry.summary(name)}\n      {values}\n"
    return text


def _word(value: object) -> str:
    return (
        "null"
        if value is None
        else str(value).replace(" ", "").replace("(", "[").replace(",)", "]").replace(")", "]")
    )


def _forced(options: set[str]) -> bool:
    return "--force" in options or environment.flag("FORCE")


def _make(work: Callable[[], object]) -> object:
    """A failed run ends the command with its sentence: exit code 2 where the words were at fault, else 1."""
    try:
        return work()
    except RunFailed as failure:
        if failure.kind in ("bad_input", "machine"):
            raise ValueError(str(failure)) from failure
        say(f"experiments: {failure.attempt.run_id} failed: {failure}")
        say(f"experiments: `python -m experiments why {failure.attempt.run_id}` shows the logs")
        raise SystemExit(1) from failure


def _summary(attempt: Attempt) -> str:
    manifest = attempt.manifest
    lines = [f"{attempt.run_id} attempt {attempt.number}: {manifest['state']}"]
    if manifest.get("why"):
        lines.append(f"  why: {manifest['why']}")
    if manifest["state"] == "running":
        lines[0] += " (or its machine died: no process need be there)"
    ranks = attempt.rank_paths()
    if ranks:
        records, dropped = read_lines(ranks[0])
        steps = [record for record in records if record["kind"] == "step"]
        epochs = [record for record in records if record["kind"] == "epoch"]
        lines.append(
            f"  {len(steps)} steps recorded on each of {len(ranks)} ranks"
            + f", {dropped} broken" * bool(dropped)
        )
        if steps:
            times = sorted(step["step_s"] for step in steps)
            mode = (read_json(attempt.path / "config.json") or {}).get("timing", {}).get("mode")
            lines.append(
                f"  median step {1e3 * times[len(times) // 2]:.1f} ms on rank 0 ({mode}, n = {len(times)})"
            )
        if epochs:
            lines.append(f"  top-1 {epochs[-1]['val_top1']:.2f} % after {epochs[-1]['step']} steps")
    searching = manifest.get("searching") or {}
    if searching.get("kernel"):
        wrong = f", the guessed bound wrong in {searching['fallbacks']} of {searching['steps']} searches"
        lines.append(f"  searched by {searching['kernel']}" + wrong * (searching["kernel"] != "torch"))
    lines.append(f"  {_relative(attempt.path)}")
    return "\n".join(lines)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

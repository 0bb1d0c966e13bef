"""A GPU's first minutes: `make gpu-first`; on a CPU a rehearsal of them, `make gpu-first ARGS="device=cpu"`.

Parts that ended well are not run again, so several short calls go on where the last one stopped:
`make gpu-first ARGS="--minutes 9"`. What was found lies in results/gpu-first/<device>, one file for the state
of all parts (state.json), a log for each, and the summary.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.files import write_atomic
from experiments.bench.gpu_first import page, state
from experiments.bench.gpu_first.call import Call
from experiments.bench.gpu_first.parts import PARTS, Part
from experiments.bench.gpu_first.promises import NOT_MET, outcomes
from experiments.config.folders import Folders
from experiments.launch.diagnosis import Interrupted
from experiments.launch.end_signals import EndSignals
from slurm import environment, gpus
from sparsify.ranges import unknown

OK, FAILED, BAD_INPUT = 0, 1, 2
FOLDER = "gpu-first"
BAD = ("failed", "too long")  # a part that ended so has not shown what it is there for


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-first", description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="print the parts with their minutes, and end")
    parser.add_argument("--parts", help=f"these only, with commas: {','.join(part.name for part in PARTS)}")
    parser.add_argument(
        "--minutes", type=float, help="of this call; what does not fit waits for the next one"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, toy sizes"
    )
    parser.add_argument("--ship", action="store_true", help="copy state and summary into results/shipped")
    # device=cpu is taken as well, for so it is said to the other commands.
    asked = parser.parse_args([f"--{word}" if word.startswith("device=") else word for word in words])
    try:
        return first_minutes(asked)
    except ValueError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}: take a folder that can be written, "
                      "SPARSIFY_RESULTS names it")  # fmt: skip


def refuse(sentence: str) -> int:
    print(f"gpu-first: {sentence}", file=sys.stderr)
    return BAD_INPUT


def first_minutes(asked: argparse.Namespace, parts: Sequence[Part] = PARTS) -> int:
    """The parts that were asked for; returns the exit code."""
    rehearsal = asked.device == "cpu"
    named = [] if asked.parts is None else asked.parts.split(",")
    for name in named:
        if name not in {part.name for part in parts}:
            raise ValueError(unknown("part", name, [part.name for part in parts]))
    if asked.minutes is not None and not asked.minutes > 0:
        raise ValueError(f"--minutes {asked.minutes:g}: must be more than 0")
    if rehearsal and asked.ship:
        raise ValueError("--ship: a rehearsal on a CPU is no GPU's result")
    chosen = [part for part in parts if part.name in named] if named else parts
    if asked.plan:
        print(page.plan(chosen, rehearsal))
        return OK
    device = "CPU" if rehearsal else gpu_name()
    folders = Folders()
    folder = folders.results / FOLDER / state.name_of(device, rehearsal)
    folder.mkdir(parents=True, exist_ok=True)
    found = state.read(folder / state.NAME, device, rehearsal)
    results, variables = folders.results, environment.variables()
    if rehearsal:  # its records are toys and stay with it; a GPU that is here is not for it
        results, variables = folder / "results", {**variables, "CUDA_VISIBLE_DEVICES": ""}
    with EndSignals() as signals, contextlib.suppress(Interrupted):
        Call(
            found,
            folder,
            variables={**variables, "SPARSIFY_RESULTS": str(results)},
            results=results,
            signals=signals,
            say=say,
            budget_s=None if asked.minutes is None else 60 * asked.minutes,
            named=named,
            force=environment.flag("FORCE"),
        ).carry_out_all(chosen)
    text = page.summary(found, parts)
    write_atomic(folder / "summary.md", text)
    print(text)
    print(folder)
    if asked.ship:
        print(*ship(found, text, folders), sep="\n")
    if signals.told:
        say("gpu-first: told to end; what was finished is kept, call again to go on")
        return FAILED
    return verdict(found)


def gpu_name() -> str:
    """Of the first GPU; found without torch, which takes seconds to import."""
    names = [gpu.name for gpu in gpus.survey().values()]
    if not names:
        raise ValueError('there is no CUDA device here; rehearse with ARGS="device=cpu"')
    return names[0]


def verdict(found: state.State) -> int:
    """The exit code. A part that ended well without saying what it is there for has failed as well."""
    has_failed = any(result.state in BAD for result in found.parts.values())
    for promise, measured, word, _ in outcomes(found):
        result = found.parts.get(promise.part)
        is_unsaid = measured is None and result is not None and result.state == "ok" and not result.reused
        has_failed |= is_unsaid or word == NOT_MET
    return FAILED if has_failed else OK


def ship(found: state.State, text: str, folders: Folders) -> list[Path]:
    """What everybody may see: no log, no path."""
    target = folders.shipped / FOLDER / state.name_of(found.device, found.rehearsal)
    target.mkdir(parents=True, exist_ok=True)
    state.write(target / state.NAME, state.public(found))
    write_atomic(target / "summary.md", text)
    return [target / state.NAME, target / "summary.md"]


def say(line: str) -> None:
    if line:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

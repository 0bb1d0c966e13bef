"""The command line: python -m experiments COMMAND [WORD ...]"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence

from experiments.worker import DISK_FULL

USAGE = """\
python -m experiments COMMAND [WORD ...]

  run WORD ...              one run:  run method=topk method.density=0.001 task=cnn_cifar10 workers=8
  reproduce ITEM ... WORD   figures:  reproduce fig4 profile=laptop        (make reproduce-fig4)
  figures [ITEM ...]        draw again from stored records; needs no torch (make figures)
  collect [--ship]          all runs into results/records/*.parquet        (--ship: the complete figures' runs
                            into results/shipped, which the repository carries, and redraw those)

on a cluster (cluster=NAME, a file of conf/cluster), `run` and `reproduce` queue jobs and wait for them, or:

  plan ITEM|WORD ...        runs, arrays, node-hours; --sbatch: what sbatch is given
  submit ITEM|WORD ...      queue what is missing, return at once:  submit method=topk,dgc cluster=NAME
  status [SWEEP|RUN]        where they stand
  logs RUN                  the end of its logs
  cancel SWEEP|RUN          end jobs; what is finished or saved is kept
  why RUN [--against RUN]   what a run did and why it failed; or what differed between where two were measured

  COMMAND --help            what stands behind a command
  --force, or FORCE=1       measure again what is already measured (earlier attempts are kept)
  --traceback               show where an error came from
"""

OK, FAILED, BAD_INPUT = 0, 1, 2
OPTIONS = ("--against", "--force", "--help", "--sbatch", "--ship", "--traceback")


def main(words: Sequence[str]) -> int:
    options = {word for word in words if word.startswith("--") or word == "-h"}
    plain = [word for word in words if word not in options]
    try:
        return _dispatch(plain, options)
    except KeyboardInterrupt as error:
        return _end(
            error,
            "interrupted: workers stopped; what was finished is kept, run again to go on",
            FAILED,
            options,
        )
    except ValueError as error:
        return _end(error, str(error), BAD_INPUT, options)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "is read-only" if error.errno == errno.EROFS else "may not be written by you"
            advice = "make it writable, or set SPARSIFY_RESULTS to a folder that is"
            return _end(error, f"{error.filename} {what}: {advice}", BAD_INPUT, options)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _end(error, f"{error.filename}: {DISK_FULL}", FAILED, options)
        raise


def _end(error: BaseException, sentence: str, code: int, options: set[str]) -> int:
    if "--traceback" in options:
        traceback.print_exception(error)
    print(f"experiments: {sentence}", file=sys.stderr)
    return code


def _dispatch(words: Sequence[str], options: set[str]) -> int:
    from experiments import commands  # after the options are known: a bare --help imports nothing

    command, rest = (words[0], words[1:]) if words else ("", [])
    unknown = options - {*OPTIONS, "-h"}
    if unknown:
        raise ValueError(f"no option {min(unknown)!r}; there are: {', '.join(OPTIONS)}")
    if not command:
        print(USAGE, end="")
        return OK if options & {"--help", "-h"} else BAD_INPUT
    if command not in commands.COMMANDS:
        raise ValueError(f"no command {command!r}; there are: {', '.join(commands.COMMANDS)}")
    if options & {"--help", "-h"}:
        print(commands.explain(command), end="")
        return OK
    return commands.carry_out(command, list(rest), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Words that nobody means, and what must hold of every one: a sentence or a run that means something.

python -m tests.commands.words 10000     tries so many, and stops at the first that takes a second
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from analysis.records.configs import run_id
from experiments.__main__ import main
from experiments.config import choices, compose, data_root

SLOW_S = 1.0  # of this process, not of the clock on the wall
# Few, for each choice takes a tenth of a second to compose; by hand all are tried.
GROUPS = {"method": ("topk", "dgc", "terngrad"), "cluster": ("virtual", "generic_slurm")}
ALL = ("method", "task", "cluster", "link", "container", "recipe")
ODD = [
    "", " ", "nan", "inf", "-inf", "-1", "-0.0", "0", "1", "1.5", "2", "1e-300", "1e400", "999999999999999",
    "9" * 400, "9" * 5000, "true", "maybe", "null", "None", "???", "abc", "[]", "[1]", "[-1]", "[[1]]",
    "[a,b]", "[nan]", "[1,", "{}", "{a:1}", "{a:{b:1}}", "a,b", "1,2", "int32,int64", "topk,dgc",
    "range(0,3)", "range(3,0)", "range(0,3,0)", "range(0,1,0.5)", "range(0,999999999999)", "range(0,nan)",
    "glob(*)", "glob(top*)", "interval(0,1)", "shuffle(1,2)", "shuffle(range(0,999999999))", "choice(1,2)",
    "choice()", "sort(3,1)", "int(x)", "float(1)", "str(1)", "json_str({a:1})", "extend_list(1)", "tag(a,b)",
    "${seed}", "${oc.env:HOME}", "${nothing}", "$(touch x)", "`id`", ";id", "|id", "&", "x/../../..", "../..",
    "/", "/etc/passwd", "'a\nb'", "'a\n#SBATCH --uid=0'", "'\x1b[31m'", "'\x07'", "\x1b]0;x\x07", "\u202etxt",
    "\udcff", "'\udcff'", "é", "'é'", "日本", "'", '"', "\\", "'\\'", "(", ")", "[" * 200, "'" * 3, "a=b",
    "a:b", "%s", "{0}", "--x", "-h", "@", "a@b", "x" * 300, "x" * 6000, "0x10", "1_000", "1e3", "01",
    "{a", "[1", "1=2", "'a", "a,,b", "foo()", "int()", "--", "=", "\0",
    "+1", "\u0661", "off", "yes",
]  # fmt: skip

# The grammar's own, and some that it does not know.
SIGNS = "[](){},=:'\"\\$ a1.-_~;&#\n\0é"
# Words of the grammar's parser, of Python and of libraries: no sentence for people has them.
FOREIGN = re.compile(
    r"mismatched input|extraneous input|no viable alternative|token recognition|<EOF>|expecting"
    r"|while evaluating|No closing quotation|invalid literal|could not convert|NoneType|no attribute"
    r"|No module named|[a-z]Error\b|Exception\b"
)


def keys(choices: dict[str, str]) -> list[str]:
    """All that can be set where these groups are chosen."""
    with contextlib.suppress(ValueError):
        return sorted(compose.leaves(compose.resolve([f"{key}={value}" for key, value in choices.items()])))
    return ["seed"]


@st.composite
def some_words(draw: st.DrawFn, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Some choices of groups, and some keys with values that seldom fit; keys that are none, too."""
    chosen = draw(st.lists(st.sampled_from(sorted(groups)), max_size=2, unique=True))
    choices = {group: draw(st.sampled_from(sorted(groups[group]))) for group in chosen}
    known = st.sampled_from(keys(choices))
    odd_keys = st.sampled_from(
        ["", " ", "+nothing", "++cluster.where", "~seed", "hydra.run.dir", "method@x", "a" * 500]
    )
    prefixed = st.tuples(st.sampled_from(["+", "++", "~", "-", " ", "\x1b"]), known).map("".join)
    key = st.one_of(
        known, known, known, known, st.sampled_from(sorted(groups)), prefixed, odd_keys, st.text(max_size=5)
    )
    signs = st.text(SIGNS, max_size=8)
    value = st.one_of(
        st.sampled_from(ODD), st.sampled_from(ODD), signs, st.text(max_size=8), st.integers().map(str)
    )
    pairs = draw(st.lists(st.tuples(key, value).map("=".join), min_size=1, max_size=3))
    return draw(st.permutations([f"{group}={name}" for group, name in choices.items()] + pairs))


def check_run(words: Sequence[str]) -> None:
    """They mean one run, all of whose values make sense; or a sentence says why not."""
    try:
        config = compose.resolve(words)
    except ValueError as error:
        sentence = str(error)
    else:
        assert_sound(config.as_dict())
        return
    assert 10 < len(sentence) < 3000, sentence
    assert not FOREIGN.search(sentence), sentence


def assert_sound(config: dict[str, Any]) -> None:
    """By rules that know nothing of the schema: nothing is there that a choice of groups does not bring, of
    another kind than it brings, negative, not finite, or with characters that a terminal would obey.
    """
    chosen = {group: config[group]["name"] for group in ("task", "cluster", "container")}
    chosen |= {
        "link": config["cluster"]["link"]["name"],
        "recipe": config["recipe"],
        "method": config["method"]["name"],
    }
    assert_alike(config, compose._composed(tuple(chosen.items()), *choices.folders()).config.as_dict())
    json.dumps(config).encode()
    name = run_id(config)
    assert Path(name).name == name
    assert name.isprintable()


def assert_alike(value: Any, usual: Any, key: str = "") -> None:
    if isinstance(usual, dict):
        assert set(value) == set(usual), key
        for part in usual:
            assert_alike(value[part], usual[part], f"{key}.{part}")
    elif isinstance(value, list):
        for one in value:
            assert_alike(one, None, key)
    else:
        assert not isinstance(value, dict), (key, value)
        assert isinstance(value, bool) == isinstance(usual, bool) or usual is None or value is None, (
            key,
            value,
        )
        if isinstance(value, float | int):
            assert value >= 0, (key, value)
            assert math.isfinite(value) or key == ".method.clip", (key, value)
            assert usual is None or isinstance(usual, float | int) or key == ".method.scope", (key, value)
        if isinstance(value, str):
            assert not isinstance(usual, float | int), (key, value)
            assert not any(ord(one) < 32 or ord(one) == 127 for one in value), (key, value)


def check_command(words: Sequence[str], call: Callable[[Sequence[str]], tuple[int, str, str]]) -> None:
    """A command ends with an exit code that was agreed on, and with lines that a terminal can show."""
    code, out, err = call(words)
    assert code in (0, 1, 2), (code, err)
    assert "Traceback" not in err
    assert not FOREIGN.search(err), err
    assert all(line.isprintable() for line in err.splitlines()), err
    assert code != 2 or err.startswith("experiments: ") or "\nexperiments: " in err, err
    if "--sbatch" in words:  # no word becomes a line of the script
        begins = ("#", "sh experiments/launch/begin.sh ", "srun ", "export ", sys.executable, "[", "x")
        assert all(not line or line.startswith(begins) or "job_hooks" in line for line in out.splitlines()), (
            out
        )


def called(words: Sequence[str]) -> tuple[int, str, str]:
    """What a command ends with and prints, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


NAMES = (
    "why", "logs", "status", "cancel", "collect", "plan", "list", "figures", "compare", "advise", "bench",
    "sweep", "nothing",
)  # fmt: skip


def commands(groups: Mapping[str, Sequence[str]]) -> st.SearchStrategy[list[str]]:
    """Words behind commands that start nothing."""
    found = some_words(groups)
    texts = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=8)), min_size=1, max_size=2)
    return st.one_of(
        found.map(lambda words: ["plan", "cluster=generic_slurm", "profile=smoke", *words]),
        found.map(lambda words: ["plan", "cluster=neuron_a100", *words, "--sbatch"]),
        st.tuples(st.sampled_from(NAMES), texts).map(lambda both: [both[0], *both[1]]),
    )


def try_words(number: int) -> None:
    """By hand: all groups, half the number as runs and half as commands, none of which takes a second."""
    data_root.reachable = lambda host: False
    groups = {group: tuple(choices.options(group)) for group in ALL}
    slowest: tuple[float, Sequence[str]] = (0.0, ())
    for name in NAMES:  # what they import is not the words' doing
        called([name, "--help"])

    def within_a_second(check: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
        def timed(words: Sequence[str]) -> None:
            nonlocal slowest
            began = time.process_time()
            check(words)
            slowest = max(slowest, (time.process_time() - began, words))
            assert slowest[0] < SLOW_S, slowest

        return timed

    often = settings(
        max_examples=number // 2, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    often(given(some_words(groups))(within_a_second(check_run)))()
    often(given(commands(groups))(within_a_second(lambda words: check_command(words, called))))()
    print(f"{number} times: no traceback, no nonsense; the slowest took {slowest[0]:.2f} s: {slowest[1]!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARSIFY_RESULTS"] = folder
        try_words(int(sys.argv[1]))

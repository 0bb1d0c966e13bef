"""Words that nobody means: each becomes a sentence, or a run that means something."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.records.configs import run_id
from experiments.config import choices, compose, dataset_files, grammar
from tests.conftest import Command, refused

# Few, for each choice takes a tenth of a second to compose.
GROUPS = {"method": ("topk", "dgc", "terngrad"), "cluster": ("virtual", "generic_slurm")}
ODD = [
    "", " ", "nan", "inf", "-1", "-0.0", "0", "1.5", "1e400", "9" * 400, "9" * 5000, "true",
    "null", "None", "???", "abc", "[]", "[-1]", "[[1]]", "[a,b]", "[1,", "{}", "{a:{b:1}}", "1,2",
    "int32,int64", "topk,dgc", "range(0,3)", "range(3,0)", "range(0,3,0)", "range(0,999999999999)",
    "range(0,nan)", "glob(top*)", "interval(0,1)", "shuffle(range(0,999999999))", "choice()",
    "int(x)", "extend_list(1)", "tag(a,b)", "${seed}", "${oc.env:HOME}", "${nothing}",
    "$(touch x)", "`id`", ";id", "x/../../..", "..", "/etc/passwd", "'a\n#SBATCH --uid=0'", "'\x1b[31m'",
    "\x1b]0;x\x07", "\u202etxt", "\udcff", "'\udcff'", "日本", "'", '"', "\\", "(", "[" * 200,
    "'" * 3, "a=b", "a:b", "{0}", "-h", "@", "x" * 6000, "0x10", "1_000", "01", "a,,b", "foo()",
    "--", "=", "\0", "+1", "\u0661", "off",
]  # fmt: skip

# The grammar's own, and some that it does not know.
SIGNS = "[](){},=:'\"\\$ a1.-_~;&#\n\0é"
# Words of the grammar's parser, of Python and of libraries: no sentence for people has them.
FOREIGN = re.compile(
    r"mismatched input|extraneous input|no viable alternative|token recognition|<EOF>|expecting"
    r"|while evaluating|No closing quotation|invalid literal|could not convert|NoneType|no attribute"
    r"|No module named|[a-z]Error\b|Exception\b"
)

NAMES = (
    "why", "logs", "status", "cancel", "collect", "plan", "list", "figures", "compare", "advise", "bench",
    "sweep", "nothing",
)  # fmt: skip
FEW = settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def keys(groups: dict[str, str]) -> list[str]:
    """Return all that can be set where these groups are chosen."""
    with contextlib.suppress(ValueError):
        return sorted(
            compose.settable_type_by_key(compose.resolve([f"{key}={value}" for key, value in groups.items()]))
        )
    return ["seed"]


@st.composite
def some_words(draw: st.DrawFn) -> list[str]:
    """Draw some choices of groups, and some keys with values that seldom fit; keys that are none, too."""
    groups = {
        group: draw(st.sampled_from(GROUPS[group]))
        for group in draw(st.lists(st.sampled_from(sorted(GROUPS)), max_size=2, unique=True))
    }
    known = st.sampled_from(keys(groups))
    prefixed = st.tuples(st.sampled_from(["+", "++", "~", "-", " ", "\x1b"]), known).map("".join)
    odd = ["", " ", "+nothing", "++cluster.where", "~seed", "hydra.run.dir", "method@x", "a" * 500, *GROUPS]
    key = st.one_of(known, known, known, st.sampled_from(odd), prefixed, st.text(max_size=5))
    value = st.one_of(st.sampled_from(ODD), st.text(SIGNS, max_size=8), st.text(max_size=8))
    pairs = draw(st.lists(st.tuples(key, value), min_size=1, max_size=3))
    return draw(st.permutations(["=".join(pair) for pair in (*groups.items(), *pairs)]))


def some_commands() -> st.SearchStrategy[list[str]]:
    """Draw words behind commands that start nothing."""
    words = some_words()
    texts = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=8)), min_size=1, max_size=2)
    return st.one_of(
        words.map(lambda words: ["plan", "cluster=generic_slurm", "profile=smoke", *words]),
        words.map(lambda words: ["plan", "cluster=neuron_a100", *words, "--sbatch"]),
        st.tuples(st.sampled_from(NAMES), texts).map(lambda both: [both[0], *both[1]]),
    )


def refusal_of(call: Callable[[], object]) -> str:
    """Return the sentence with which words are refused; nothing where they are taken."""
    sentence = ""
    try:
        call()
    except ValueError as error:
        sentence = str(error)
    assert not FOREIGN.search(sentence), sentence
    return sentence


@FEW
@given(words=some_words())
def test_words_mean_a_run_that_makes_sense_or_are_answered(words: list[str]) -> None:
    sentence = refusal_of(lambda: check_is_sound(words))
    assert not sentence or 10 < len(sentence) < 3000, sentence


def check_is_sound(words: Sequence[str]) -> None:
    """Compare a run with what its choices of groups bring, by rules that know nothing of the schema."""
    config = compose.resolve(words).as_dict()
    chosen = {group: config[group]["name"] for group in ("task", "cluster", "container", "method")}
    chosen |= {"link": config["cluster"]["link"]["name"], "recipe": config["recipe"]}
    check_is_alike(
        config, compose._compose_choices(tuple(chosen.items()), *choices.conf_folders()).config.as_dict()
    )
    json.dumps(config).encode()
    name = run_id(config)
    assert Path(name).name == name
    assert name.isprintable()


def check_is_alike(value: Any, usual: Any, key: str = "") -> None:
    """Refuse what is of another kind than usual, negative, not finite, or obeyed by a terminal."""
    if isinstance(usual, dict):
        assert set(value) == set(usual), key
        for part in usual:
            check_is_alike(value[part], usual[part], f"{key}.{part}")
        return
    if isinstance(value, list):
        for part in value:
            check_is_alike(part, None, key)
        return
    is_number = isinstance(value, float | int)
    is_usual_number = isinstance(usual, float | int)
    faults = {
        "a mapping": isinstance(value, dict),
        "no truth value": isinstance(value, bool) != isinstance(usual, bool) and None not in (value, usual),
        "negative": is_number and value < 0,
        "not finite": is_number and not math.isfinite(value) and key != ".method.clip",
        "a number": is_number and usual is not None and not is_usual_number and key != ".method.scope",
        "a text": isinstance(value, str) and is_usual_number,
        "obeyed": isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value) is not None,
    }
    assert not any(faults.values()), (key, value, faults)


@FEW
@given(text=st.text(SIGNS, max_size=12))
@pytest.mark.parametrize("key", ["seed", "variants"])
def test_what_can_not_be_read_is_told_without_the_words_of_a_grammar(key: str, text: str) -> None:
    refusal_of(lambda: grammar.parse_values(key, text, max_count=5))
    if "${" not in text:  # as the sentence advises
        assert grammar.parse_value("task.text", grammar.format_hydra_value(text)) == text


@FEW
@given(words=some_commands())
def test_commands_end_with_lines_that_a_terminal_can_show(
    words: list[str], here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "is_reachable", lambda host: False)
    done = here(*words)
    assert done.returncode in (0, 1, 2), done
    assert "Traceback" not in done.stderr
    assert not FOREIGN.search(done.stderr), done
    assert all(line.isprintable() for line in done.stderr.splitlines()), done
    assert done.returncode != 2 or re.search("(?m)^experiments: ", done.stderr), done
    if "--sbatch" in words:  # no word becomes a line of the script
        begins = ("#", "sh experiments/launch/begin.sh ", "srun ", "export ", sys.executable, "[", "x")
        lines = [line for line in done.stdout.splitlines() if line and "job_hooks" not in line]
        assert all(line.startswith(begins) for line in lines), lines


def test_words_that_mean_nothing_are_refused_in_a_sentence(here: Command) -> None:
    """See also tests/config/test_compose.py for the words that a configuration knows."""
    for words, *answers in (
        ("reproduce fig9", "no item 'fig9'", "fig4"),
        ("reproduce", "reproduce what?", "fig4"),
        ("run method=dgg --help", "no method 'dgg' (did you mean 'dgc'?)"),
        ("why nothing", "0 runs match 'nothing'"),
        ("why one other", "`why 'one' --against 'other'`"),
    ):
        refused(here(*words.split()), *answers)
    traced = here("run", "workers=0", "--traceback")
    assert traced.returncode == 2
    assert "Traceback" in traced.stderr

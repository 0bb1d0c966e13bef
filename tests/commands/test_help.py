"""`run --help`, and what words before it choose."""

from __future__ import annotations

import pytest

from tests.conftest import Command, fine, refused


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["method=dgc"], ["Deep Gradient", "method.momentum=0.9", "null: do not clip"], ["comm="]),
        (["method=topk_layerwise"], ["k of every tensor instead", "method.scope=layer"], ["task.lr="]),
        (["task=cnn_digits"], ["8 x 8", "task.batch_size=16", "images of each worker"], ["method.feedback"]),
        (["cluster=generic_slurm"], ["cluster.partition=null", "what --partition gets"], ["cluster.name"]),
        (["link=ethernet"], ["10 Gbit/s", "cluster.link.beta_s_per_byte=8e-10"], ["cluster.gpu"]),
        (["recipe=yoon2022"], ["workers=8", "task.lr_milestones=[81,122,155]"], ["threads="]),
        (["profile=smoke"], ["train.steps=8", "end the run after so many steps"], ["threads="]),
    ],
)  # fmt: skip
def test_a_choice_is_explained_alone(
    words: list[str], shown: list[str], hidden: list[str], here: Command
) -> None:
    helped = fine(here("run", *words, "--help"))
    for text in shown:
        assert text in " ".join(helped.stdout.split()), helped.stdout
    for text in hidden:
        assert text not in helped.stdout


def test_help_on_nothing_is_answered(here: Command) -> None:
    refused(here("run", "method=dgg", "--help"), "no method 'dgg' (did you mean 'dgc'?)")


def test_figures_are_listed_with_their_titles(here: Command) -> None:
    helped = here("figures", "--help")
    assert "fig4                      Breakdown of an iteration\n" in helped.stdout
    assert "settings" not in helped.stdout


def test_help_fits_the_terminal(here: Command) -> None:
    long = {"  cluster.link.beta_s_per_byte=4.35e-12", "{dense:'method=dense',sparse:'method=topk"}
    for columns in (80, 100):
        lines = here("run", "--help", COLUMNS=str(columns)).stdout.splitlines()
        assert [line for line in lines if len(line) >= columns and line.strip() not in long] == []

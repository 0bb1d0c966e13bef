# %% [markdown]
# # Who waits for whom? From the job logs of Yoon and Oh 2022
#
# The paper says that Top-k's communication is slow because workers wait for the one that selects last. The
# report's page of `fig4-logs` says how much of it that explains over a whole job. Here you look into a job:
# does waiting change during training, do late iterations come in groups, and what is left of communication
# when lateness is taken off?
#
# Nothing is measured: the tables in `results/published/yoon2022` hold facts from the authors' public logs.
# Change `JOB` and `WINDOW`, and run the cells again.

# %%
# %matplotlib inline
import sys
from pathlib import Path

here = Path.cwd()
ROOT = next(folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists())
sys.path.insert(0, str(ROOT))  # the checkout; only the library is installed

import numpy as np
import pandas as pd

from analysis import plots, published
from analysis.pictures import style
from analysis.published import rederived
from analysis.records import phases

# %% [markdown]
# The jobs that ran once each; times in ms. Those of four workers logged no iterations.

# %%
published.jobs()

# %%
JOB = rederived.JOB["A100", "topk"]
WINDOW = 48  # iterations behind one point: the authors' training loop turns after so many

# %% [markdown]
# One row is one iteration. `late` is by how much the last rank selects longer than the mean of the ranks;
# `wait` is the communication of a rank on average, `send` that of the rank that comes last and waits for
# nobody. Iterations with a validation of rank 0 in them (`long_waits`) are left out, and so are the first 100
# and the first of each loop.


# %%
def iterations(job: int) -> pd.DataFrame:
    """Iterations of a job without validation: `late`, `wait` and `send` in ms."""
    table = rederived.settled(job)
    without = (table["long_waits"] == 0) & ~rederived.starts_a_loop(table)
    names = {"comp_mean_ms": "select", "comm_mean_ms": "wait", "comm_min_ms": "send"}
    table = table[without].rename(columns=names)
    table["late"] = table["comp_max_ms"] - table["select"]
    found: pd.DataFrame = table[["iteration", "select", "late", "wait", "send"]]
    return found


job = iterations(JOB)
job.describe(percentiles=[0.05, 0.5, 0.95]).round(2)

# %% [markdown]
# ## Does it change during training?
#
# Medians over windows. If waiting came from the network, it would not follow selection.

# %%
windows = job.groupby(job["iteration"] // WINDOW)[["select", "late", "wait", "send"]].median()
windows.index = windows.index * WINDOW
LATE, SEND = (phases.find(phase).colour for phase in ("select", "transfer"))  # as in the bars of fig4-logs
WAIT, A100, V100 = "#777777", "#0072B2", "#E69F00"

with plots.canvas(style.two_columns(2.6), 1, 2) as (figure, (left, right)):
    left.plot(windows.index, windows["select"], color=LATE)
    left.set(xlabel="Iteration", ylabel="Selection, mean over ranks (ms)", ylim=(0, None))
    for column, colour in (("late", LATE), ("wait", WAIT), ("send", SEND)):
        right.plot(windows.index, windows[column], color=colour, label=column)
    right.set(xlabel="Iteration", ylabel="Median of a window (ms)", ylim=(0, None))
    right.legend()
figure

# %% [markdown]
# ## Do late iterations come in groups?
#
# The correlation of lateness with itself, some iterations later. Where it is near 0, lateness is drawn anew
# in each iteration; where it stays, something on the node stays slow for a while.


# %%
def echo(values: pd.Series, lags: range) -> list[float]:
    """The autocorrelation of `values` at each lag."""
    return [float(values.autocorr(lag)) for lag in lags]


lags = range(1, 2 * WINDOW)
with plots.canvas(style.two_columns(2.4)) as (figure, axes):
    for gpu, colour in (("A100", A100), ("V100", V100)):
        late = iterations(rederived.JOB[gpu, "topk"])["late"]
        axes.plot(lags, echo(late, lags), color=colour, label=f"Top-k on 8 {gpu}")
    axes.axhline(0, color="#AAAAAA", linewidth=0.6)
    axes.set(xlabel="Iterations later", ylabel="Correlation of lateness")
    axes.legend()
figure

# %% [markdown]
# ## What is left when lateness is taken off?
#
# If lateness were the whole cause, `wait - late` would be what sending takes, and as narrow. On the V100s it
# is not: something else makes ranks wait there.

# %%
edges = np.arange(-15, 35, 0.5)
with plots.canvas(style.two_columns(2.4), 1, 2, sharex=True) as (figure, both):
    for axes, gpu in zip(both, ("A100", "V100"), strict=True):
        table = iterations(rederived.JOB[gpu, "topk"])
        for values, colour, label in (
            (table["wait"], WAIT, "wait"),
            (table["wait"] - table["late"], LATE, "wait - late"),
            (table["send"], SEND, "send"),
        ):
            axes.hist(values, edges, color=colour, label=label, histtype="step", density=True)
        axes.set(xlabel="ms", title=f"Top-k, 8 {gpu}")
    both[0].set_ylabel("Density of iterations (1/ms)")
    both[1].legend()
figure

# %%
pd.DataFrame(
    {
        gpu: {
            "variance of wait (ms²)": table["wait"].var(),
            "variance of wait - late (ms²)": (table["wait"] - table["late"]).var(),
            "median of wait - late (ms)": (table["wait"] - table["late"]).median(),
            "median of send (ms)": table["send"].median(),
        }
        for gpu in ("A100", "V100")
        for table in [iterations(rederived.JOB[gpu, "topk"])]
    }
).round(2)

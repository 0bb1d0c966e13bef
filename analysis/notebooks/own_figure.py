# %% [markdown]
# # A figure of one's own, from records to SVG
#
# The report shows accuracy against optimiser steps. What does accuracy cost in bytes? This notebook asks
# that of the runs behind Figs. 2 and 3: it loads records, picks runs, draws them in the style of the other
# figures, and saves the picture. Copy it and ask something else.

# %%
# %matplotlib inline
import os
import sys
from pathlib import Path

here = Path.cwd()
ROOT = next(folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists())
sys.path.insert(0, str(ROOT))  # the checkout; only the library is installed

import pandas as pd

import analysis
from analysis import plots, stats
from analysis.pictures import captions, style
from analysis.records.frames import label, query
from analysis.tables import Table

# %% [markdown]
# ## Load, and pick runs
#
# `analysis.load()` reads your own runs and those that come with the repository: a row of `runs` is a run, a
# row of `epochs` one of its validations. What each column means is in `docs/records.md`.

# %%
frames = analysis.load(tables=["runs", "epochs"])
frames.runs[["items", "method.name", "task.name", "workers", "seed", "val_top1", "wire_bytes"]].head()

# %%
picked = query(frames, "items.str.contains('fig2') and train.epochs == 138")
label(picked.runs).tolist()

# %% [markdown]
# ## Compute
#
# `wire_bytes` is what one worker puts on the wire in a step, as a mean since the row before; so the sum
# over steps is what it has sent so far. Means and 95 % intervals over seeds come from `analysis.stats`,
# which refuses to mix runs of different protocols.


# %%
def megabytes_sent(run: pd.DataFrame) -> pd.Series:
    """What a worker has sent at each validation of a run, in MB."""
    steps = run["step"].diff().fillna(run["step"])
    return (steps * run["wire_bytes"]).cumsum() / 1e6


def by_method() -> dict[str, pd.DataFrame]:
    """Per method: top-1 at each validation (mean, low, high), and the megabytes sent until then."""
    found = {}
    for name, keys in keys_of.items():
        first = picked.epochs[picked.epochs["key"] == keys[0]]  # the others have sent as much
        table = stats.curve(picked, keys, "val_top1")
        found[name] = table.assign(sent_mb=megabytes_sent(first).to_numpy())
    return found


keys_of = {str(name): list(runs["key"]) for name, runs in picked.runs.groupby("method.name", sort=False)}
methods = by_method()
columns = {
    "method": [style.look(name).label for name in methods],
    "sent by a worker": [table["sent_mb"].iloc[-1] for table in methods.values()],
    "top-1": [stats.final(picked, keys, "val_top1") for keys in keys_of.values()],
}
ends = Table("At the end of training", pd.DataFrame(columns), {"sent by a worker": "MB", "top-1": "%"})
print(ends.markdown())

# %% [markdown]
# ## Draw
#
# `style.look` gives a method the colour and marker that it has in every figure; `plots.canvas` gives sizes
# and fonts for print.

# %%
with plots.canvas(style.two_columns(2.8)) as (figure, axes):
    for name, table in methods.items():
        plots.curve(axes, table["sent_mb"], table, style.look(name))
    axes.set(xscale="log", xlabel="Sent by a worker (MB)", ylabel="Validation top-1 (%)")
    axes.grid(visible=True)
    axes.legend()
figure

# %% [markdown]
# Read it from left to right: with so many megabytes, which method is ahead? A caption should say what was
# measured; these words come from the records.

# %%
print(captions.setting(picked), captions.training(picked))

# %% [markdown]
# ## Save
#
# SVG and PDF for a thesis, PNG for the screen; the same picture always gives the same bytes. The
# table goes beside it, for LaTeX. To keep the figure as an item of its own, with `make
# reproduce-...`, begin with `python -m experiments new figure thesis_bytes`.

# %%
folder = Path(os.environ.get("SPARSIFY_RESULTS") or ROOT / "results") / "figures"
style.save(figure, folder, "accuracy-against-bytes")
(folder / "accuracy-against-bytes.tex").write_text(ends.tex())
sorted(path.name for path in folder.glob("accuracy-against-bytes.*"))

"""Style of figures: sizes, one colour per method and per phase in every figure, and reproducible files.

Functions return matplotlib settings as plain dicts, to be merged with `|`; nothing here changes global state.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.records.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

PAGE_WIDTH_INCHES = 7.16  # inches, IEEE
# What each format would write of the day and of the program: the same picture has the same bytes anywhere.
OMITTED_METADATA = {
    "png": ("Software",), "pdf": ("CreationDate", "Producer", "Creator"), "svg": ("Date", "Creator"),
}  # fmt: skip


class MethodStyle(NamedTuple):
    """The label and look of a method in every figure; marker and hatch serve readers who see no colours."""

    label: str
    colour: str
    marker: str
    hatch: str


# Okabe and Ito's palette, whose colours can be told apart with the common colour vision deficiencies.
METHOD_STYLES = {
    "dense": MethodStyle("dense", "#000000", "o", ""),
    "topk": MethodStyle("Top-k", "#0072B2", "s", "//"),
    "randomk": MethodStyle("Random-k", "#D55E00", "^", ".."),
    "randomk-hash": MethodStyle("Random-k, cheap draw", "#A6761D", "<", "oo"),
    "randomk-feedback": MethodStyle("Random-k with feedback", "#CC79A7", "v", "xx"),
    "topk-layer": MethodStyle("Top-k layer-wise", "#56B4E9", "D", "\\\\"),
    "topk-fused": MethodStyle("Top-k, fused", "#009E73", "h", "--"),
    "topk-buckets-fused": MethodStyle("Top-k, fused, buckets", "#E69F00", "X", "||"),
    "topk-buckets-fused-overlapped": MethodStyle("Top-k, fused, overlapped", "#882255", "*", "++"),
    "null": MethodStyle("null (first k)", "#999999", "P", "++"),
    "dgc": MethodStyle("DGC", "#6A3D9A", "p", "\\\\"),
    "gaussiank": MethodStyle("Gaussian-k", "#BBAA33", "d", "oo"),
    "gtopk": MethodStyle("gTop-k", "#33691E", "H", "xx"),
    "oktopk": MethodStyle("Ok-Topk", "#C2185B", "8", "//"),
    "powersgd": MethodStyle("PowerSGD", "#661100", "1", "||"),
    "sparcml": MethodStyle("SparCML", "#8C6BB1", ">", ".."),
}
# For methods without a look of their own: Tol's muted palette, chosen by the method's name, so that the
# colour does not depend on the other methods of a figure.
OTHER_COLOURS = ("#117733", "#882255", "#999933", "#332288", "#44AA99", "#AA4499")
OTHER_MARKERS = ("X", "p", "h", "<", ">", "*", "d")


def base_rc_settings() -> dict[RcKeyType, Any]:
    """Return matplotlib's settings for every figure, from page.mplstyle."""
    from matplotlib import rc_params_from_file  # here, since lists and tables know labels, too

    path = Path(__file__).with_name("page.mplstyle")
    return dict(rc_params_from_file(path, use_default_template=False))


def two_column_rc_settings(height_inches: float = 2.7) -> dict[RcKeyType, Any]:
    """Return matplotlib's settings for a figure as wide as the page."""
    return base_rc_settings() | {"figure.figsize": (PAGE_WIDTH_INCHES, height_inches)}


# Columns of a run that tell which method it is.
METHOD_COLUMNS = ("variant", "method.name", "method.scope", "method.feedback", "select", "overlap")


def method_id(run: Mapping[Any, Any]) -> str:
    """Return the name by which figures tell methods apart: name, scope, feedback, how the selection is run.

    `run` is a row of `Frames.runs`; pandas does not promise that columns are named by text. What took turns
    with others has a name of its own.
    """
    if isinstance(run.get("variant"), str):
        return str(run["variant"])
    name = str(run["method.name"])
    if run.get("method.scope") == "layer":
        name += "-layer"
    feedback = run.get("method.feedback")
    if name == "randomk" and (_is_true(feedback) or feedback == "gradient"):
        name += "-feedback"
    return name + _execution_suffix(run)


def _execution_suffix(run: Mapping[Any, Any]) -> str:
    """Return how the same mathematics is executed, where it is not as published."""
    scope, text = run.get("method.scope"), ""
    if scope not in (None, "global", "layer") and scope == scope:  # a size in MB; NaN: it has no scope
        text += "-buckets"
    if run.get("select") == "fused":
        text += "-fused"
    return text + ("-overlapped" if _is_true(run.get("overlap")) else "")


def method_style(method: str) -> MethodStyle:
    """Return the look of a `method_id`; for an unknown one always the same, by its name."""
    if method in METHOD_STYLES:
        return METHOD_STYLES[method]
    digest = hashlib.sha256(method.encode()).digest()
    colour = OTHER_COLOURS[digest[0] % len(OTHER_COLOURS)]
    return MethodStyle(method, colour, OTHER_MARKERS[digest[1] % len(OTHER_MARKERS)], "oo")


def save_png_pdf_svg(figure: Figure, folder: Path, name: str) -> Path:
    """Write `name`.png, .pdf and .svg, and return the path of the PNG; a figure always gives equal bytes."""
    import matplotlib  # as above

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(base_rc_settings()):
        for kind, nothing in OMITTED_METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=dict.fromkeys(nothing))
            write_atomic(folder / f"{name}.{kind}", buffer.getvalue())
    return folder / f"{name}.png"


def _is_true(value: Any) -> bool:
    """Return True for True, also as the text that it becomes in a column of mixed types."""
    return value is True or value == json.dumps(True)

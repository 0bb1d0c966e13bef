"""Lines that no log should hold: damage that readers of lines, and the commands above them, must survive."""

from __future__ import annotations

import sys

STEP = b'{"kind":"step","step":0,"epoch":1,"start_s":0.0,"step_s":1.0}'
LOOK = b'{"kind":"look","step":0,"what":"norms","of":"all","xs":[0.0],"values":[1.0]}'
DEPTHS = (50, 900, 990, 5_000, 100_000)  # around Python's limit, which the frames of a caller count for


def _with(line: bytes, field: bytes) -> bytes:
    return line[:-1] + b"," + field + b"}"


def _nested() -> dict[str, bytes]:
    found = dict[str, bytes]()
    for depth in DEPTHS:
        lists = b"[" * depth + b"]" * depth
        objects = b'{"a":' * depth + b"1" + b"}" * depth
        found[f"{depth} lists"] = lists
        found[f"{depth} objects"] = objects
        found[f"a step with {depth} lists"] = _with(STEP, b'"unknown":' + lists)
        found[f"a step with {depth} objects"] = _with(STEP, b'"unknown":' + objects)
        # What else a look may have is passed over where it can be read, as newer Pythons can.
        if depth > 1_000 and sys.version_info < (3, 14):
            found[f"a look with {depth} lists"] = _with(LOOK, b'"unknown":' + lists)
        found[f"a step of {depth} lists"] = STEP.replace(b'"step":0', b'"step":' + lists)
        found[f"a variant of {depth} objects"] = _with(STEP, b'"variant":' + objects)
    found["open lists"] = b"[" * 100_000
    return found


WRITTEN = r"""
5 -> 5
null -> null
[] -> []
text -> "x"
{} -> {}
half -> {"ki
half of a character -> {"kind":"look","step":0,"what":"norms","of":"\ud800","xs":[0.0],"values":[1.0]}
a step that is a list -> {"kind":"step","step":[0],"epoch":1,"start_s":0.0,"step_s":1.0}
a step that is an object -> {"kind":"step","step":{},"epoch":1,"start_s":0.0,"step_s":1.0}
a step that is a text -> {"kind":"step","step":"0","epoch":1,"start_s":0.0,"step_s":1.0}
a step that is infinite -> {"kind":"step","step":1e999,"epoch":1,"start_s":0.0,"step_s":1.0}
a time that is NaN -> {"kind":"step","step":0,"epoch":1,"start_s":NaN,"step_s":1.0}
a variant that is a list -> {"kind":"step","step":0,"epoch":1,"start_s":0.0,"step_s":1.0,"variant":[]}
an unknown kind -> {"kind":"stop","step":0,"epoch":1,"start_s":0.0,"step_s":1.0}
a kind that is a list -> {"kind":["step"],"step":0,"epoch":1,"start_s":0.0,"step_s":1.0}
"""


def _written() -> dict[str, bytes]:
    rows = [row.partition(" -> ") for row in WRITTEN.strip().splitlines()]
    return {name: line.encode() for name, _, line in rows}


# Each is refused by every reader of lines but `dict`, which may read it as the object that it is.
BROKEN: dict[str, bytes] = {
    **_nested(), **_written(),
    "NUL": b"\0", "nothing": b"", "NULs": bytes(4096),
    "garbage after it": STEP + b"garbage", "NUL after it": STEP + b"\0",
    "byte order mark": b"\xef\xbb\xbf" + STEP, "UTF-16": STEP.decode().encode("utf-16"),
    "not UTF-8 in a kind": b'{"kind": "step\xff"}',
    "not UTF-8 in a variant": _with(STEP, b'"variant":"\xff"'),
    "not UTF-8 in a look": LOOK.replace(b"all", b"\xff\xfe"),
    "not UTF-8 in a name": _with(STEP, b'"\xff":1'),
    "a step of many digits": STEP.replace(b'"step":0', b'"step":' + b"9" * 5_000),
    "a time of many digits": STEP.replace(b'"start_s":0.0', b'"start_s":' + b"9" * 400),
    "ten million digits": b"9" * 10_000_000,
}  # fmt: skip

"""The tables of published facts, made again from a clone of github.com/kljp/topk_results.

python -m analysis.published CLONE            does the repository ship what the logs say?
python -m analysis.published CLONE FOLDER     write the tables into FOLDER as well
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.published import tables

OK, DIFFERENT, BAD_INPUT = 0, 1, 2


def main(words: Sequence[str]) -> int:
    if len(words) not in (1, 2):
        print(f"which clone?\n{__doc__}", file=sys.stderr)
        return BAD_INPUT
    try:
        derived_tables = tables.read_tables_from_logs(Path(words[0]))
        if len(words) == 2:
            tables.write_tables(derived_tables, Path(words[1]))
        differences = tables.find_table_differences(
            derived_tables, tables.read_verified_tables(tables.FOLDER)
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print("\n".join(differences) if differences else "the shipped tables are what these logs say")
    return DIFFERENT if differences else OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

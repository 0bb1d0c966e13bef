"""The benchmark: one file in, one row out, by rules: docs/benchmark.md in words, v2.yaml in numbers.

rules.py reads them; entries.py says what takes part (entries.yaml: what the repository enters itself) and
which runs an entry is made of; laws.py checks its laws before it costs hours; entering.py leads it from stage
to stage, and checking.py checks somebody else's. An entry's file, and what follows from it cell by cell, is
`analysis.benchmark`, which needs none of this.
"""

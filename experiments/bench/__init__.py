"""Benchmarks: `make bench BENCH=NAME`; files that start with _ are parts of them.

Each prints its machine, medians with spread, and one line of JSON last.
"""

"""Benchmarks: `make bench BENCH=NAME`. Each prints its machine, medians with spread, and one line of JSON
last.
"""

"""The benchmark of selection: `make bench BENCH=select`. Its cases, its records, its page and its picture."""

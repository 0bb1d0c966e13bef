"""Results of the benchmark: from the file of each entry, cell by cell, and as pages.

statement.py is what a file says, files.py reads and writes it with its tables, cells.py computes each cell,
and site.py writes the pages.
"""

"""The report: static pages on figures, verdicts and runs, which a browser reads from the disk.

content.py says what it holds of a figure, plain data that the command gathers; runs.py reads a run's numbers
from frames; pages.py writes the pages from templates/ and assets/.
"""

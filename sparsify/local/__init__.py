"""Local steps: workers train alone for several steps, and average between rounds how far they have moved."""

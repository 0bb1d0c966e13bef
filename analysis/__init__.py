"""What do the numbers say? From records to frames, statistics, verdicts and figures; without torch."""

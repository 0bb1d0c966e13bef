"""What do the numbers say? Records in, frames, statistics, verdicts and figures out. Knows nothing of
torch.
"""

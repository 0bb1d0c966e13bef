"""What all parts stand on: buckets, messages, clocks, checks, saved states, the memory below."""

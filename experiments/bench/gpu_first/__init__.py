"""A GPU's first minutes: what to measure first, in parts that resume; rehearsed on a CPU."""

"""The base of all parts: buckets, messages, clocks, checks, signatures, and memory in huge pages."""

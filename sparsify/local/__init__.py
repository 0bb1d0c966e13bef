"""Local steps: each worker steps by itself, and every so often all average what they have moved."""

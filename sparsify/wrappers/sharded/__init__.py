"""Wrappers of models whose parameters are sharded (FSDP2, HSDP): they average between replicas."""

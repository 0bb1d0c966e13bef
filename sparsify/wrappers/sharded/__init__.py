"""Models whose parameters are sharded (FSDP2, HSDP): gradients meet between the replicas of each shard."""

"""Records of runs: files on disk, their schemas, and tidy frames of them all."""

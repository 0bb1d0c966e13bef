"""What runs measured: files on disk, what they must look like, and tidy frames of them all."""

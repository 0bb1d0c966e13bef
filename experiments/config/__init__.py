"""Which runs a command means: words -> resolved configs -> planned runs. Needs no torch."""

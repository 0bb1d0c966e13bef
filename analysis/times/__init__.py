"""Step times: what they are due to, when a level is reached, what a round takes, a timeline."""

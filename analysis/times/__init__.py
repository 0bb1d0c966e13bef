"""What step times say: what they are due to, when a level is reached, what a round takes, a timeline."""

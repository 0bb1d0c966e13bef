"""Expected times: of a step by its parts, and of a run by earlier runs."""

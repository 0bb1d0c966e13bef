"""Process of a run: it meets the others, looks at its machine, trains, and leaves a record."""

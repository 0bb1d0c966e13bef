"""Models of language: their tasks, their networks, and the optimisers that transformers are trained with."""

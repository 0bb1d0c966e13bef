"""How does a function reach a GPU? Places, launches, clusters. Knows nothing of gradients."""

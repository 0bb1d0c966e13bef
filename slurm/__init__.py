"""How does a function reach a GPU? Clusters, containers, job arrays, worker processes; without gradients."""

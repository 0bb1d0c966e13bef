"""Nodes that slow links join, on one Linux machine: network namespaces, a bridge, token buckets."""

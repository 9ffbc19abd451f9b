"""Micro-benchmarks, each next to the bare floor measured in the same run: `python -m benchmarks`."""

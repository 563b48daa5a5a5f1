"""Benchmarks and their tests; see README.md."""

"""The repository keeps its own rules; its benchmarks run."""

"""CUDA without a GPU: a runtime and operators that replace torch's, a plugin, and their tests; see README.md."""

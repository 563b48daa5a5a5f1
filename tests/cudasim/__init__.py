"""CUDA without a GPU: a runtime and operators in front of torch's, a plugin, and their tests; see README.md."""

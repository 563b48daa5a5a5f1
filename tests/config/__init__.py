"""The block, and what stands at the top of the package."""

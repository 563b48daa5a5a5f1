"""Regions: swap and recompute."""

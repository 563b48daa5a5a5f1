"""The technique that swaps and recomputes regions, by fractions of rows (tokens)."""

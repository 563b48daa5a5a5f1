"""The swap technique: copies whole tensors of any kind to the host between two of their uses (Chameleon)."""

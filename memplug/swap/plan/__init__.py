"""The swap list: which tensors are away from the device between two of their uses (Chameleon, section 5)."""

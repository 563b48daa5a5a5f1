"""Plans swap lists: chooses tensors to copy to the host between two of their uses (Chameleon, section 5)."""

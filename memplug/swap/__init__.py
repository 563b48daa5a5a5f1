"""A technique: tensors of any kind that are away from the device, whole, between two uses (Chameleon)."""

"""The swap list: storages that leave and return, tensors that are found again, whole trainings."""

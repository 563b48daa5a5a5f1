"""Tests of the swap list: offloaded storages, tensors that are found again, whole trainings."""

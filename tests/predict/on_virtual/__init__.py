"""What the virtual device does, and memplug on it.

Run by tests/predict/virtual/test_virtual.py in processes of their own: torch has one such device for good, and learns
of it before the first backward.
"""

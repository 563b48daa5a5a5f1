"""Cases for the virtual device, and for memplug on it.

tests/predict/virtual/test_virtual.py runs them in processes of their own: torch has one such device for good, and must
learn of it before the first backward.
"""

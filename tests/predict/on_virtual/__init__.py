"""Cases for the virtual device, and for memplug on it.

tests/predict/virtual/test_virtual.py runs them in processes of their own: a process can register only one such
device with torch, before its first backward.
"""

"""Holds `sitecustomize.py` alone: the folder is on `PYTHONPATH` of the processes that `memplug run` starts."""

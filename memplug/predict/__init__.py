"""Predictions of a training's time and memory, made without a GPU."""

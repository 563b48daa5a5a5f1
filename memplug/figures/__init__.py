"""The data of figures and summaries, for any technique or trace. Imports no torch."""

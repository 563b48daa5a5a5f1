"""The data of figures and summaries, whichever technique or trace they show; no torch."""

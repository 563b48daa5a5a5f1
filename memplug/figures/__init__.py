"""What figures are made of, whichever technique or trace they show; no torch."""

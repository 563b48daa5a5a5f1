"""The parts of `memplug run` inside each Python process of a command; none of them imports torch."""

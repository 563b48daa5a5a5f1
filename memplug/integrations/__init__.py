"""Callbacks for the training loops of other libraries: attach, mark steps, detach. memplug itself imports none."""

"""Callbacks for the training loops of other libraries: attach, mark steps, detach. Only users import them."""

"""Callbacks for training loops that others wrote: they attach, mark steps and detach. Imported by name, never by memplug."""

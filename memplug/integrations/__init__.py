"""Callbacks for training loops that others wrote: attach, mark steps, detach. Imported by name, never by memplug."""

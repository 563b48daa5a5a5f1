"""What memplug changes in its hosts; all patching lives here."""

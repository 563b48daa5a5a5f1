"""All changes that memplug makes to frameworks; all patching lives here."""

"""The native core by itself."""

"""Trace to what a person looks at: a summary, a page, a picture, and files for two well-known viewers; no torch."""

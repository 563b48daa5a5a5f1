"""Views of traces and plans: a summary, a page, a picture, and files for two well-known viewers; no torch."""

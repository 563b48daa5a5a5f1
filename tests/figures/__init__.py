"""Pictures, pages and summaries."""

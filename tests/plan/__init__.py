"""Decisions, the cost model, plans as files, the judge."""

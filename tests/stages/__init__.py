"""When techniques plan, and what is remembered."""

"""Programs that others wrote, with memplug and without: equal losses, equal weights."""

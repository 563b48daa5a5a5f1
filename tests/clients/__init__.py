"""Programs by others, with memplug and without: equal losses, equal weights."""

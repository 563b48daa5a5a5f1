"""All patches and hooks that memplug puts into frameworks and models."""

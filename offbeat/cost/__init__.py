"""Task → seconds; plan → bytes."""

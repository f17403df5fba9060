"""`rabbit-tasks demo`: real work end to end."""

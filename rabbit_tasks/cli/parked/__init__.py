"""`rabbit-tasks parked`: the parking lot. It needs a queue, not the app."""

from rabbit_tasks.cli.parked import archiving, discarding, reading, replaying  # noqa: F401  (they register)

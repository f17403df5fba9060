"""The parking lot: read it, replay from it, discard.

parked       a message as it lies there
look         how to look without changing anything; what every command here stands on
replaying    back to the main queues, with fresh attempts
discarding   gone for good
"""

from rabbit_tasks.parking.choice import Choice
from rabbit_tasks.parking.discarding import discard
from rabbit_tasks.parking.look import Moved, browse
from rabbit_tasks.parking.parked import Choose, ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.replaying import replay

__all__ = [
    "Choice", "Choose", "Moved", "ParkedMessage", "ParkingQueue", "browse", "discard", "replay",
]  # fmt: skip

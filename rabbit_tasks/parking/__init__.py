"""The parking lot: read it, replay from it, discard, export and import.

parked       a message as it lies there
look         how to look without changing anything; what every command here stands on
replaying    back to the main queues, with fresh attempts
discarding   gone for good
foreign      dead letter queues that are not ours
archive      out into lines of JSON, and back
"""

from rabbit_tasks.parking.archive import Archived, Imported, export_to, import_from
from rabbit_tasks.parking.choice import Choice
from rabbit_tasks.parking.discarding import Asked, discard
from rabbit_tasks.parking.look import Moved, browse
from rabbit_tasks.parking.parked import Choose, ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.replaying import replay

__all__ = [
    "Archived",
    "Asked",
    "Choice",
    "Choose",
    "Imported",
    "Moved",
    "ParkedMessage",
    "ParkingQueue",
    "browse",
    "discard",
    "export_to",
    "import_from",
    "replay",
]

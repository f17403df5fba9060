"""The parking lot: read it, replay from it, discard, export and import.

parked       a message as it lies there
look         how to look without changing anything; what every command here stands on
groups       by kind of failure
lots         every parking queue of the broker
replaying    back to the main queues, with fresh attempts
staging      how many at a time go there, so that a kill leaves none twice
conveyor     a channel that moves them as bytes
canary       what becomes of the first few
discarding   gone for good
foreign      dead letter queues that are not ours
archive      out into lines of JSON, and back
"""

from rabbit_tasks.parking.archive import Archived, Imported, export_to, import_from
from rabbit_tasks.parking.choice import Choice
from rabbit_tasks.parking.discarding import Asked, discard
from rabbit_tasks.parking.groups import Group, grouped
from rabbit_tasks.parking.look import Moved, browse
from rabbit_tasks.parking.lots import Lot, looked_at, parking_queues
from rabbit_tasks.parking.parked import Choose, ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.replaying import Replayed, replay

__all__ = [
    "Archived",
    "Asked",
    "Choice",
    "Choose",
    "Group",
    "Imported",
    "Lot",
    "Moved",
    "ParkedMessage",
    "ParkingQueue",
    "Replayed",
    "browse",
    "discard",
    "export_to",
    "grouped",
    "import_from",
    "looked_at",
    "parking_queues",
    "replay",
]

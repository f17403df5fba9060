"""The doctor: looks at the broker and at what is ours on it, and says what is wrong.

facts         what was seen
examination   how it is seen: over AMQP, and the management API where it is reachable
diagnosis     what it means, in rows of ok, warning and fault: of us, of the broker, of the app
"""

from rabbit_tasks.doctor.diagnosis import diagnose, has_fault
from rabbit_tasks.doctor.examination import examine
from rabbit_tasks.doctor.facts import Facts
from rabbit_tasks.doctor.row import Row

__all__ = ["Facts", "Row", "diagnose", "examine", "has_fault"]

"""The doctor: looks at the broker and at what is ours on it, and says what is wrong.

facts         what was seen
examination   how it is seen: over AMQP, and the management API where it is reachable
diagnosis     what it means, in rows of ok, warning and fault
"""

from rabbit_tasks.doctor.diagnosis import Row, diagnose, has_fault
from rabbit_tasks.doctor.examination import examine
from rabbit_tasks.doctor.facts import Facts

__all__ = ["Facts", "Row", "diagnose", "examine", "has_fault"]

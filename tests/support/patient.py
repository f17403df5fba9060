"""The obedient handlers without a time limit, one slot each, and retries that wait a while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from tests.support.obedient import Order, run, run_async

PATIENT = RetryPolicy(delays=(timedelta(milliseconds=600), timedelta(milliseconds=700)))


class Patient(Consumer[Order]):
    """async def"""

    queue = "patient.async"
    retry = PATIENT

    async def handle(self, order: Order, message: Message) -> None:
        await run_async(order, message)


class PatientInThread(Consumer[Order]):
    """def"""

    queue = "patient.thread"
    retry = PATIENT

    def handle(self, order: Order, message: Message) -> None:
        run(order, message)


class PatientInProcess(Consumer[Order]):
    """def in a child process"""

    queue = "patient.process"
    retry = PATIENT
    isolation = "process"

    def handle(self, order: Order, message: Message) -> None:
        run(order, message)


@asynccontextmanager
async def _gate() -> AsyncIterator[None]:
    """All loaded, children too; connects when the file is there that PATIENT_GATE names."""
    gate = os.environ.get("PATIENT_GATE")
    if gate:
        print("at the gate", flush=True)  # noqa: T201 (the tests wait for it)
    while gate and not Path(gate).exists():  # noqa: ASYNC240 (a test's own file)
        await asyncio.sleep(0.01)
    yield


app = App("patient", [Patient(), PatientInThread(), PatientInProcess()], lifespan=_gate)
KINDS = (Patient, PatientInThread, PatientInProcess)

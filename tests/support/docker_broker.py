"""stop, start, kill, freeze, thaw a container, or ctl …: `docker_broker.py CONTAINER API VERB`."""

from __future__ import annotations

import subprocess
import sys

VERBS = {"stop": "stop", "start": "start", "kill": "kill", "freeze": "pause", "thaw": "unpause"}

if __name__ == "__main__":
    container, api, verb, *arguments = sys.argv[1:]
    if verb == "ctl":
        command = ["docker", "exec", container, "rabbitmqctl", *arguments]
        sys.exit(subprocess.run(command).returncode)
    subprocess.run(["docker", VERBS[verb], container], check=True)
    if verb == "start":
        from tests.support.brokers import wait_for_api

        wait_for_api(api)

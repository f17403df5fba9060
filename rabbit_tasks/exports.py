"""A topology in the language of what else may create it: Terraform, Kubernetes.

Pure: a topology in, text out, sorted: the same topology, the same text. RabbitMQ's own definitions are
`Topology.definitions()`. Whatever creates the queues, `rabbit-tasks topology check` compares them.

Neither may delete a queue because it goes from the file: a retry queue of an older policy goes from it
while messages wait in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.topology import Binding, Exchange, Queue, Topology

# --- Terraform ----------------------------------------------------------------------------------

_TERRAFORM: Final = """\
# Generated: rabbit-tasks topology export --format terraform
# The queues of app {app}. Needs, once in this folder:
#
#   terraform {{
#     required_providers {{
#       rabbitmq = {{ source = "cyrilgdn/rabbitmq" }}
#     }}
#   }}
#
# Terraform refuses to delete a queue that is no longer in this file (prevent_destroy): messages may wait
# in it. Let it run empty, take it out of Terraform's state, and let rabbit_tasks remove it:
#
#   terraform state rm 'rabbitmq_queue.{name}["QUEUE"]'
#   rabbit-tasks topology declare --prune

variable "{name}_vhost" {{
  type    = string
  default = {vhost}
}}
"""

_EXCHANGES: Final = """
resource "rabbitmq_exchange" "{name}" {{
  for_each = local.{name}_exchanges

  name  = each.key
  vhost = var.{name}_vhost

  settings {{
    type        = each.value.type
    durable     = true
    auto_delete = false
  }}

  lifecycle {{
    prevent_destroy = true
  }}
}}
"""

_QUEUES: Final = """
resource "rabbitmq_queue" "{name}" {{
  for_each = local.{name}_queues

  name  = each.key
  vhost = var.{name}_vhost

  settings {{
    durable        = true
    auto_delete    = false
    arguments_json = jsonencode(each.value)
  }}

  lifecycle {{
    prevent_destroy = true
  }}
}}
"""

_BINDINGS: Final = """
resource "rabbitmq_binding" "{name}" {{
  for_each = local.{name}_bindings

  vhost            = var.{name}_vhost
  source           = rabbitmq_exchange.{name}[each.value.exchange].name
  destination      = rabbitmq_queue.{name}[each.key].name
  destination_type = "queue"
  routing_key      = each.value.key
}}
"""


def terraform(topology: Topology, app: str, vhost: str = "/") -> str:
    """Resources of the provider cyrilgdn/rabbitmq, in Terraform's own language.

    app     named in the addresses: rabbitmq_queue.<app>["images.resize"]
    vhost   the default of the variable <app>_vhost

    ConfigurationError for a queue whose name that provider cannot carry: it takes its resources' ids
    apart at @ and / (1.8 to 1.10).
    """
    for place in [vhost, *(queue.name for queue in topology.queues)]:
        if "@" in place or ("/" in place and place is not vhost):
            what = "virtual host" if place is vhost else "queue"
            raise ConfigurationError(
                f"{what} {place!r}: the Terraform provider cyrilgdn/rabbitmq cannot keep a name with "
                "@ or / apart from the rest of an id; create it otherwise: rabbit-tasks topology declare"
            )
    name = _identifier(app)
    fields = {"app": app, "name": name, "vhost": _hcl(vhost)}
    if not topology.queues:
        return _TERRAFORM.format(**fields)
    exchanges = {e.name: {"type": e.type} for e in topology.exchanges}
    queues = {q.name: q.arguments for q in topology.queues}
    bindings = {b.queue: {"exchange": b.exchange, "key": b.key} for b in topology.bindings}
    named = [
        f"  {name}_{what} = {_hcl(value, '  ')}\n"
        for what, value in (("exchanges", exchanges), ("queues", queues), ("bindings", bindings))
    ]
    return (
        _TERRAFORM.format(**fields) + "\nlocals {\n" + "\n".join(named) + "}\n"
        + "".join(part.format(**fields) for part in (_EXCHANGES, _QUEUES, _BINDINGS))
    )  # fmt: skip


def _hcl(value: Any, indent: str = "") -> str:
    """A value in Terraform's language, as its formatter would lay it out."""
    if isinstance(value, dict):
        keys = {key: _hcl(key) for key in sorted(value)}
        inner = indent + "  "
        # `terraform fmt` aligns what stands in one line each.
        flat = not any(isinstance(one, dict) for one in value.values())
        wide = max((len(key) for key in keys.values()), default=0) if flat else 0
        lines = [
            f"{inner}{key:{wide}} = {_hcl(value[name], inner)}\n" for name, key in keys.items()
        ]
        return "{\n" + "".join(lines) + indent + "}"
    if isinstance(value, str):
        # Its strings have JSON's escapes but for \/ \b \f, which json.dumps writes as \u00NN where we
        # ask it to; and templates, which begin with ${ and %{.
        text = json.dumps(value, ensure_ascii=False).replace(r"\b", r"\u0008")
        return re.sub(r"([$%])(?=\{)", r"\1\1", text.replace(r"\f", r"\u000c"))
    return json.dumps(value)


def _identifier(app: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", app):
        return app
    return f"app_{re.sub(r'[^A-Za-z0-9]', '_', app)}_{_digest(app)}"


# --- Kubernetes ---------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST: Final = 253

_KUBERNETES: Final = """\
# Generated: rabbit-tasks topology export --format k8s
# The queues of app {app}, for RabbitMQ's messaging topology operator. A queue that goes from this file
# stays on the broker (deletionPolicy), since messages may wait in it; empty ones of an older policy are
# removed by: rabbit-tasks topology declare --prune
"""


def kubernetes(
    topology: Topology, app: str, *, cluster: str, namespace: str | None = None, vhost: str = "/"
) -> str:
    """Objects for RabbitMQ's messaging topology operator: a YAML document each, exchanges first.

    cluster     the RabbitmqCluster's name, or NAMESPACE/NAME where it is in another namespace
    namespace   of the objects; None leaves it to kubectl

    ConfigurationError for names that Kubernetes does not take.
    """
    where, _, cluster_name = cluster.rpartition("/")
    for what, name in (("cluster", cluster_name), ("namespace", where), ("namespace", namespace)):
        if name and (not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)):
            raise ConfigurationError(
                f"{what} {name!r}: Kubernetes takes up to 63 small letters, digits and -, which is "
                "neither first nor last"
            )
    if not cluster_name:
        raise ConfigurationError(f"cluster {cluster!r}: write NAME, or NAMESPACE/NAME")
    reference = {"name": cluster_name, **({"namespace": where} if where else {})}
    shared = {"vhost": vhost, "rabbitmqClusterReference": reference}

    def document(kind: str, of: str, spec: dict[str, Any]) -> str:
        metadata = {"name": object_name(of), **({"namespace": namespace} if namespace else {})}
        content = {
            "apiVersion": "rabbitmq.com/v1beta1", "kind": kind, "metadata": metadata,
            "spec": {**spec, **shared},
        }  # fmt: skip
        return "---\n" + "".join(_yaml(content))

    documents = [
        *(document("Exchange", e.name, _exchange(e)) for e in _sorted(topology.exchanges)),
        *(document("Queue", q.name, _queue(q)) for q in _sorted(topology.queues)),
        *(document("Binding", b.queue, _binding(b)) for b in _sorted(topology.bindings)),
    ]
    return _KUBERNETES.format(app=app) + "".join(documents)


def object_name(name: str) -> str:
    """The name of a Kubernetes object for this queue or exchange: its own where Kubernetes takes it,
    else what is left of it and a digest. Never the same for two."""
    # No name of a queue with -- is taken as it is, so that none is that of another with its digest.
    if _NAME.fullmatch(name) and len(name) <= _LONGEST and "--" not in name:
        return name
    left = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    left = re.sub(r"-*\.[-.]*", ".", left)[:200].strip("-.")
    return f"{left or 'queue'}--{_digest(name)}"


def _exchange(exchange: Exchange) -> dict[str, Any]:
    return {"name": exchange.name, "type": exchange.type, "durable": True, "autoDelete": False}


def _queue(queue: Queue) -> dict[str, Any]:
    return {
        "name": queue.name, "type": queue.arguments["x-queue-type"], "durable": True,
        "autoDelete": False, "deletionPolicy": "retain",
        "arguments": dict(sorted(queue.arguments.items())),
    }  # fmt: skip


def _binding(binding: Binding) -> dict[str, Any]:
    return {
        "source": binding.exchange, "destination": binding.queue, "destinationType": "queue",
        "routingKey": binding.key,
    }  # fmt: skip


def _yaml(value: dict[str, Any], indent: str = "") -> Iterable[str]:
    for name, one in value.items():
        if isinstance(one, dict):
            yield f"{indent}{name}:\n"
            yield from _yaml(one, indent + "  ")
        elif isinstance(one, str) and (name in ("apiVersion", "kind") or _is_plain(one)):
            yield f"{indent}{name}: {one}\n"
        else:
            # A JSON value is a YAML value.
            yield f"{indent}{name}: {json.dumps(one, ensure_ascii=False)}\n"


def _is_plain(text: str) -> bool:
    """Whether YAML takes it for text, in each of its versions."""
    words = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return re.fullmatch(r"[a-z]+(-[a-z]+)*", text) is not None and text not in words


def _sorted(things: Iterable[Any]) -> list[Any]:
    return sorted(things, key=lambda one: getattr(one, "name", "") or one.queue)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]

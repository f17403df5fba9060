"""Do with exported files what those who take them do: read them, and ask the management API.

Readers of as much of Terraform's language and of YAML as is written here, which were held against
HashiCorp's own parser and PyYAML; the requests are those of the provider cyrilgdn/rabbitmq 1.8 and of
the messaging topology operator 1.17, as their sources have them.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from tests.support.brokers import Broker

# --- Terraform ----------------------------------------------------------------------------------

_TOKEN = re.compile(
    r'\s*(?:#[^\n]*|("(?:[^"\\]|\\.)*")|([\w.]+(?:\[[\w.]+\])?(?:\.\w+)?)|([{}=()]))'
)


def terraform(text: str) -> dict[str, Any]:
    """The file's blocks by their labels: {"resource.rabbitmq_queue.demo": {…}, "locals": {…}, …}."""
    tokens: list[str] = []
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        assert found, text[at : at + 50]
        tokens += [part for part in found.groups() if part]
        at = found.end()
    blocks, _ = _body([*tokens, "}"], 0)
    return blocks


def _body(tokens: list[str], at: int) -> tuple[dict[str, Any], int]:
    content: dict[str, Any] = {}
    while tokens[at] != "}":
        name, at = _text(tokens[at]), at + 1
        if tokens[at] == "=":
            content[name], at = _value(tokens, at + 1)
            continue
        while tokens[at] != "{":
            name, at = f"{name}.{_text(tokens[at])}", at + 1
        assert name not in content, name
        content[name], at = _body(tokens, at + 1)
    return content, at + 1


def _value(tokens: list[str], at: int) -> tuple[Any, int]:
    token = tokens[at]
    if token == "{":
        return _body(tokens, at + 1)
    if token == "jsonencode":
        return ("jsonencode", tokens[at + 2]), at + 4
    if token.startswith('"') or token in ("true", "false") or token.isdecimal():
        return (_text(token) if token.startswith('"') else json.loads(token)), at + 1
    return ("reference", token), at + 1


def _text(token: str) -> str:
    if not token.startswith('"'):
        return token
    assert not re.search(r"(?<![$%])[$%]\{", token), f"{token} is a template"
    text: str = json.loads(re.sub(r"([$%])\1(?=\{)", r"\1", token))
    return text


def apply_terraform(broker: Broker, text: str, vhost: str | None = None) -> None:
    """Create what the file says, each resource for each of its keys."""
    blocks = terraform(text)
    (variable,) = (name for name in blocks if name.startswith("variable."))
    where = vhost or blocks[variable]["default"]
    scope = {variable.replace("variable.", "var."): where}
    for name, value in blocks.get("locals", {}).items():
        scope[f"local.{name}"] = value
    for kind in ("exchange", "queue", "binding"):
        (label,) = (name for name in blocks if name.startswith(f"resource.rabbitmq_{kind}."))
        resource = blocks[label]
        for key, value in _evaluated(resource["for_each"], scope).items():
            inner = {**scope, "each.key": key, "each.value": value}
            if isinstance(value, dict):
                inner.update({f"each.value.{name}": one for name, one in value.items()})
            _create(broker, kind, _evaluated(resource, inner))


def _evaluated(value: Any, scope: dict[str, Any]) -> Any:
    match value:
        case dict():
            return {
                name: _evaluated(one, scope) for name, one in value.items() if name != "for_each"
            }
        case ("jsonencode", str(name)):
            return json.dumps(scope[name])
        case ("reference", str(name)):
            # rabbitmq_queue.demo[each.key].name is the key: what for_each names its resources by.
            found = re.fullmatch(r"rabbitmq_(?:queue|exchange)\.\w+\[([\w.]+)\]\.name", name)
            return scope[found[1] if found else name]
    return value


def _create(broker: Broker, kind: str, resource: dict[str, Any]) -> None:
    vhost, name = resource["vhost"], resource.get("name", "")
    if kind == "binding":
        given = {"routing_key": resource["routing_key"], "arguments": {}}
        source, destination = resource["source"], resource["destination"]
        made = broker.api("POST", _path("bindings", vhost, "e", source, "q", destination), given)
        assert made is None
        # Its id, taken apart at each slash, must find the binding again.
        parts = (
            f"{vhost.replace('%', '%25').replace('/', '%2F')}/{source}/{destination}/queue".split(
                "/"
            )
        )
        assert parts[1:] == [source, destination, "queue"]
        return
    settings = resource["settings"]
    if "arguments_json" in settings:
        settings["arguments"] = json.loads(settings.pop("arguments_json"), parse_int=_as_go)
    assert len(f"{name}@{vhost}".split("@")) == 2
    broker.api("PUT", _path(f"{kind}s", vhost, name), settings)
    assert resource["lifecycle"] == {"prevent_destroy": True}


def _as_go(digits: str) -> int:
    """Through a float64 and back, as Go has JSON's numbers."""
    return int(float(digits))


# --- Kubernetes ---------------------------------------------------------------------------------


def documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents of a file: mappings of plain words and of JSON values."""
    found = []
    for part in text.split("---\n")[1:]:
        document: dict[str, Any] = {}
        within = [document]
        for line in part.splitlines():
            indent, name, value = re.fullmatch(r"((?:  )*)([\w-]+):(?: (.+))?", line).groups()  # type: ignore[union-attr]
            del within[len(indent) // 2 + 1 :]
            if value is None:
                within[-1][name] = {}
                within.append(within[-1][name])
            else:
                plain = re.fullmatch(r"[A-Za-z][\w./-]*", value) and value not in ("true", "false")
                within[-1][name] = value if plain else json.loads(value, parse_int=_as_go)
        found.append(document)
    return found


def apply_kubernetes(broker: Broker, text: str) -> None:
    """What the operator asks the management API for when these objects are there."""
    for document in documents(text):
        spec = document["spec"]
        vhost = spec["vhost"]
        if document["kind"] == "Binding":
            assert spec["destinationType"] == "queue"
            path = _path("bindings", vhost, "e", spec["source"], "q", spec["destination"])
            broker.api("POST", path, {"routing_key": spec["routingKey"], "arguments": {}})
            continue
        kind = {"Queue": "queues", "Exchange": "exchanges"}[document["kind"]]
        given = {"durable": spec["durable"], "auto_delete": spec["autoDelete"], "type": spec["type"],
                 "arguments": spec.get("arguments", {})}  # fmt: skip
        broker.api("PUT", _path(kind, vhost, spec["name"]), given)


def _path(*parts: str) -> str:
    return "/" + "/".join(quote(part, safe="") for part in parts)

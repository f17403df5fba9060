"""Exports: the names that Terraform and Kubernetes take, and text that says what we mean."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rabbit_tasks import App, ConfigurationError, Consumer, Message, RetryPolicy
from rabbit_tasks.exports import kubernetes, object_name, terraform
from rabbit_tasks.topology import Binding, Exchange, Queue, Topology
from tests.support import applied


def made(queue: str) -> Consumer[Any]:
    async def handle(self: Any, body: Any, message: Message) -> None: ...

    body = {"queue": queue, "handle": handle, "retry": RetryPolicy(attempts=2, jitter=False)}
    return type("Made", (Consumer,), body)()  # type: ignore[no-any-return]


MAIL = App("shop", [made("mail")]).topology
names = some.text(alphabet="abZ09 -_.:#,/+@", min_size=1, max_size=255)


def hostile(name: str) -> Topology:
    """As no app has it, but as its names might be one day."""
    queue = Queue(name, "main", name, {"x-queue-type": "quorum", "x-dead-letter-routing-key": name})
    return Topology((queue,), (Exchange("lot"),), (Binding("lot", name, name),))


def test_terraform_has_every_queue_with_its_arguments_and_deletes_none() -> None:
    blocks = applied.terraform(terraform(MAIL, "shop"))
    assert blocks["locals"] == {
        "shop_exchanges": {"parking-lot": {"type": "direct"}},
        "shop_queues": {queue.name: queue.arguments for queue in MAIL.queues},
        "shop_bindings": {"mail.parked": {"exchange": "parking-lot", "key": "mail"}},
    }
    for kind in ("exchange", "queue"):
        assert blocks[f"resource.rabbitmq_{kind}.shop"]["lifecycle"] == {"prevent_destroy": True}


@pytest.mark.parametrize("name", ['q"\\', "${name}", "%{if}", "$${x}", "a\nb\x07\b\f", "ü😀", "}"])
def test_terraform_takes_no_name_for_anything_but_text(name: str) -> None:
    blocks = applied.terraform(terraform(hostile(name), "shop", vhost=name))
    assert blocks["locals"]["shop_queues"][name]["x-dead-letter-routing-key"] == name
    assert blocks["variable.shop_vhost"]["default"] == name


@pytest.mark.parametrize("name", ["a@b", "a/b"])
def test_what_the_provider_cannot_carry_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cyrilgdn/rabbitmq cannot keep a name") as refused:
        terraform(hostile(name), "shop")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("app", ["shop", "2nd", "a.b", "a_b", "a-b"])
def test_an_apps_name_becomes_an_identifier_of_its_own(app: str) -> None:
    (label,) = (n for n in applied.terraform(terraform(MAIL, app)) if "rabbitmq_queue" in n)
    assert re.fullmatch(r"resource\.rabbitmq_queue\.[A-Za-z]\w*", label)
    assert (label.rpartition(".")[2] == app) == (app in ("shop", "a_b"))


def test_the_operator_gets_every_part_and_deletes_no_queue() -> None:
    found = applied.documents(
        kubernetes(MAIL, "shop", cluster="infra/rabbit", namespace="shop", vhost="/")
    )
    reference = {"name": "rabbit", "namespace": "infra"}
    assert found[0] == {
        "apiVersion": "rabbitmq.com/v1beta1", "kind": "Exchange",
        "metadata": {"name": "parking-lot", "namespace": "shop"},
        "spec": {"name": "parking-lot", "type": "direct", "durable": True, "autoDelete": False,
                 "vhost": "/", "rabbitmqClusterReference": reference},
    }  # fmt: skip
    assert found[1]["kind"] == "Queue"
    assert found[1]["spec"] == {
        "name": "mail", "type": "quorum", "durable": True, "autoDelete": False,
        "deletionPolicy": "retain", "arguments": MAIL.queues[0].arguments, "vhost": "/",
        "rabbitmqClusterReference": reference,
    }  # fmt: skip
    assert found[-1]["spec"] == {
        "source": "parking-lot", "destination": "mail.parked", "destinationType": "queue",
        "routingKey": "mail", "vhost": "/", "rabbitmqClusterReference": reference,
    }  # fmt: skip
    kinds = [one["kind"] for one in found]
    assert kinds == ["Exchange", *["Queue"] * len(MAIL.queues), "Binding"]
    assert all(one["spec"].get("deletionPolicy", "retain") == "retain" for one in found)


@pytest.mark.parametrize(
    "name", ["true", "no", "null", "1e3", "0x1F", "a: b", "#x", "- a", 'q"\\', "ü"]
)
def test_yaml_takes_no_name_for_anything_but_text(name: str) -> None:
    found = applied.documents(kubernetes(hostile(name), "shop", cluster="rabbit", vhost=name))
    assert [one["spec"].get("name", "") for one in found[:2]] == ["lot", name]
    assert {one["spec"]["vhost"] for one in found} == {name}
    assert found[2]["spec"]["routingKey"] == name
    assert "metadata" in found[0]
    assert "namespace" not in found[0]["metadata"]


@given(names)
def test_an_objects_name_is_one_that_kubernetes_takes(name: str) -> None:
    of_kubernetes = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
    assert re.fullmatch(of_kubernetes, object_name(name))
    assert len(object_name(name)) <= 253
    assert object_name(name) == object_name(name)


@given(some.lists(names, unique=True, max_size=20))
def test_no_two_queues_share_an_objects_name(found: list[str]) -> None:
    taken = [*found, *map(object_name, found)]
    assert len({object_name(name) for name in set(taken)}) == len(set(taken))


def test_a_plain_name_is_kept_and_another_can_be_recognised() -> None:
    assert object_name("images.resize.retry.1.500ms") == "images.resize.retry.1.500ms"
    assert re.fullmatch(r"send-mail\.parked--[0-9a-f]{10}", object_name("Send_Mail.parked"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cluster": "Rabbit"}, "cluster 'Rabbit': Kubernetes takes up to 63"),
        ({"cluster": "a/b/c"}, "namespace 'a/b'"),
        ({"cluster": "x/"}, "cluster 'x/': write NAME"),
        ({"cluster": "x", "namespace": "-a"}, "namespace '-a'"),
        ({"cluster": "x" * 64}, "takes up to 63"),
    ],
)
def test_names_that_kubernetes_does_not_take_are_refused(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        kubernetes(MAIL, "shop", **options)


def test_the_same_app_in_another_order_is_the_same_text() -> None:
    one, other = (App("a", [made(n) for n in order]).topology for order in ("xy", "yx"))
    assert terraform(one, "a") == terraform(other, "a")
    assert kubernetes(one, "a", cluster="r") == kubernetes(other, "a", cluster="r")


def test_an_app_without_consumers_is_an_empty_file() -> None:
    empty = App("empty", []).topology
    assert list(applied.terraform(terraform(empty, "empty"))) == ["variable.empty_vhost"]
    assert applied.documents(kubernetes(empty, "empty", cluster="r")) == []

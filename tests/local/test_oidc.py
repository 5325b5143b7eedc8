"""The local server of tokens: who gets one, and what it fails in. A real broker accepts its tokens
and every password, and refuses tokens that are not for it.
"""

import base64
import http.client
import json
import logging
import socket
import ssl
import time
import urllib.error
import urllib.request
from urllib.parse import quote_plus, urlencode

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError
from joserfc.jwk import KeySet
from kafka import KafkaAdminClient
from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.nodes import PASSWORD_MECHANISMS
from kafka2pc.local.oidc import LocalOidc
from kafka2pc.proof.child_process import until

SECONDS = 30  # for anything that should take one; a busy machine may need more
SECRET = "a:b c%+ü/"  # url-encoding changes each part


@pytest.fixture
def oidc():
    with LocalOidc({"al:ice": SECRET}, scopes=("read", "write")) as server:
        yield server


def get(url, **more):
    with urllib.request.urlopen(url, timeout=SECONDS, **more) as response:
        return json.load(response)


def ask(oidc, *, basic=None, **form):
    """The status, the headers and the JSON that answer a token request."""
    form = {"grant_type": "client_credentials"} | form
    headers = {"Authorization": f"Basic {basic}"} if basic else {}
    request = urllib.request.Request(oidc.token_url, urlencode(form).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return response.status, response.headers, json.load(response)
    except urllib.error.HTTPError as e:
        return e.code, e.headers, json.load(e)


def basic_of(client, secret):
    return base64.b64encode(f"{quote_plus(client)}:{quote_plus(secret)}".encode()).decode()


def claims_of(oidc, token):
    """The claims, verified by the key that the server publishes."""
    keys = KeySet.import_key_set(get(get_configuration(oidc)["jwks_uri"]))
    return jwt.decode(token, keys, algorithms=["RS256"]).claims


def get_configuration(oidc):
    return get(f"{oidc.issuer}/.well-known/openid-configuration")


# -- the server --


def test_basic_and_form_give_a_token_that_the_published_key_verifies(oidc):
    before = time.time()
    by_basic = ask(oidc, basic=basic_of("al:ice", SECRET))
    by_form = ask(oidc, client_id="al:ice", client_secret=SECRET)
    for status, headers, answer in (by_basic, by_form):
        assert status == 200 and headers["Cache-Control"] == "no-store"
        assert answer | {"access_token": ""} == {
            "access_token": "",
            "token_type": "Bearer",
            "expires_in": 300,
            "scope": "read write",
        }
        claims = claims_of(oidc, answer["access_token"])
        assert before - 1 <= claims["iat"] <= time.time() and claims["exp"] == claims["iat"] + 300
        assert {name: claims[name] for name in ("iss", "aud", "sub", "scope")} == {
            "iss": oidc.issuer,
            "aud": "kafka",
            "sub": "al:ice",
            "scope": "read write",
        }
    assert oidc.asked == 2


def test_the_configuration_names_what_there_is(oidc):
    configuration = get_configuration(oidc)
    assert configuration["issuer"] == oidc.issuer
    assert configuration["token_endpoint"] == oidc.token_url
    assert "d" not in get(configuration["jwks_uri"])["keys"][0]  # the private part
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{oidc.issuer}/other")


RAW = base64.b64encode(f"al:ice:{SECRET}".encode()).decode()


@pytest.mark.parametrize(
    ("sent", "status", "error"),
    [
        ({"basic": basic_of("al:ice", "guess")}, 401, "invalid_client"),
        ({"basic": basic_of("bob", SECRET)}, 401, "invalid_client"),
        ({"basic": RAW}, 401, "invalid_client"),
        ({"basic": "!"}, 401, "invalid_client"),
        ({"client_id": "al:ice", "client_secret": "guess"}, 401, "invalid_client"),
        ({}, 401, "invalid_client"),
        ({"basic": basic_of("al:ice", SECRET), "scope": "read admin"}, 400, "invalid_scope"),
        (
            {"basic": basic_of("al:ice", SECRET), "grant_type": "password"},
            400,
            "unsupported_grant_type",
        ),
        (
            {"basic": basic_of("al:ice", SECRET), "client_secret": SECRET},
            400,
            "invalid_request",
        ),
    ],
    ids=lambda value: str(value).replace(SECRET, "SECRET")[:40],
)
def test_a_wrong_request_gets_the_error_of_the_standard(sent, status, error, oidc):
    answered, headers, answer = ask(oidc, **sent)
    assert (answered, answer["error"], "access_token" in answer) == (status, error, False)
    assert (headers["WWW-Authenticate"] is not None) == (status == 401)


def test_a_client_gets_the_scope_that_it_asks_for(oidc):
    _, _, answer = ask(oidc, client_id="al:ice", client_secret=SECRET, scope="write")
    assert answer["scope"] == claims_of(oidc, answer["access_token"])["scope"] == "write"


def test_life_clock_audience_and_claims_can_be_changed(oidc):
    oidc.life_s, oidc.clock_off_s, oidc.audience = 5, 1000, "other"
    _, _, answer = ask(oidc, client_id="al:ice", client_secret=SECRET)
    claims = claims_of(oidc, answer["access_token"])
    assert answer["expires_in"] == claims["exp"] - claims["iat"] == 5
    assert claims["aud"] == "other" and 990 < claims["iat"] - time.time() <= 1000
    claims = claims_of(oidc, oidc.token(sub="bob", scope=None, team="blue"))
    assert (claims["sub"], claims["team"], "scope" in claims) == ("bob", "blue", False)


def changed(oidc):
    """A token with the claims of another one."""
    header, _, signature = oidc.token().split(".")
    return ".".join([header, oidc.token(sub="admin").split(".")[1], signature])


def test_neither_another_servers_token_nor_a_changed_one_is_verified(oidc):
    with pytest.raises(InvalidKeyIdError):
        claims_of(oidc, LocalOidc().token())
    with pytest.raises(BadSignatureError):
        claims_of(oidc, changed(oidc))


def test_answers_of_a_server_in_trouble(oidc):
    oidc.answer = 503
    assert ask(oidc)[::2] == (503, {})
    oidc.answer = 200
    assert ask(oidc)[::2] == (200, {})
    oidc.answer = "not json"
    with pytest.raises(json.JSONDecodeError):
        ask(oidc)
    assert oidc.asked == 3
    assert get_configuration(oidc)["issuer"] == oidc.issuer


@pytest.mark.parametrize(("answer", "received"), [("hang", b""), ("drip", b"H")])
def test_a_server_that_hangs_or_drips_answers_others_and_can_be_stopped(answer, received, oidc):
    oidc.answer = answer
    with socket.create_connection(("127.0.0.1", oidc.port), SECONDS) as client:
        client.sendall(b"POST /token HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        until(lambda: oidc.asked == 1, "the request is there")
        assert get_configuration(oidc)["issuer"] == oidc.issuer
        client.settimeout(0.4)
        got = b""
        with pytest.raises(TimeoutError):
            while part := client.recv(100):
                got += part
        assert got == received
        client.settimeout(SECONDS)
        oidc.stop()
        assert b"".join(iter(lambda: client.recv(100), b""))[:5] in (b"", b"T")


def test_a_server_that_drips_sends_all_of_its_answer(oidc, monkeypatch):
    oidc.answer = "drip"
    # it waits no second for each byte
    monkeypatch.setattr(oidc._server.ended, "wait", lambda _: False)
    status, _, answer = ask(oidc, client_id="al:ice", client_secret=SECRET)
    assert status == 200 and claims_of(oidc, answer["access_token"])["sub"] == "al:ice"


def test_a_server_that_is_stopped_can_be_started_again_with_the_same_key(oidc):
    token = oidc.token()
    oidc.stop()
    with pytest.raises(urllib.error.URLError):
        get_configuration(oidc)
    oidc.start()
    assert claims_of(oidc, token)["sub"] == "al:ice"
    with pytest.raises(RuntimeError, match="already started"):
        oidc.start()


def test_https_is_trusted_by_its_authority_only():
    with LocalOidc(tls=True) as oidc:
        with socket.create_connection(("127.0.0.1", oidc.port)):  # it never shakes hands
            url = f"{oidc.issuer}/.well-known/openid-configuration"
            trusting = ssl.create_default_context(cafile=oidc.ca)
            assert get(url, context=trusting)["jwks_uri"].startswith("https://")
            with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
                get(url)
            with pytest.raises((http.client.BadStatusLine, OSError)):
                get(url.replace("https", "http"))
        folder = oidc.ca.parent.parent
        assert folder.exists()
    del oidc
    until(lambda: not folder.exists(), "the folder is gone")


# -- the broker --


@pytest.fixture(scope="module")
def issuer():
    with LocalOidc({"svc-orders": "s3cret"}) as server:
        yield server


@pytest.fixture(scope="module")
def every_login(issuer):
    config = issuer.broker_settings("SASL_PLAINTEXT")
    with LocalKafka(
        secure=True, config=config, java_options=issuer.java_options, progress=None
    ) as kafka:
        yield kafka


def by_token(kafka, oauth_cb, **more):
    return AdminClient(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": oauth_cb,
            "log_level": 0,
        }
        | more
    )


def fetched_from(oidc):
    def fetch(_):
        _, _, answer = ask(oidc, basic=basic_of("svc-orders", oidc.clients["svc-orders"]))
        return answer["access_token"], time.time() + answer["expires_in"]

    return fetch


def refusal(client, errors):
    """What librdkafka reports of a login that the broker refuses."""
    end = time.monotonic() + SECONDS
    while not errors and time.monotonic() < end:
        client.poll(0.1)
    return errors[0].name(), errors[0].str()


@pytest.mark.kafka
@pytest.mark.parametrize("mechanism", PASSWORD_MECHANISMS)
def test_alice_logs_in_by_each_kind_of_password(mechanism, every_login):
    conf = every_login.client_conf_for("alice") | {"sasl.mechanism": mechanism, "log_level": 0}
    assert AdminClient(conf).list_topics(timeout=SECONDS).cluster_id == every_login.cluster_id
    errors = []
    wrong = AdminClient(conf | {"sasl.password": "guess", "error_cb": errors.append})
    name, text = refusal(wrong, errors)
    scram = f"during authentication due to invalid credentials with SASL mechanism {mechanism}"
    said = ": Invalid username or password" if mechanism == "PLAIN" else f" {scram}"
    assert name == "_AUTHENTICATION"
    assert f"SASL authentication error: Authentication failed{said} (after " in text


@pytest.mark.kafka
def test_a_token_logs_in_and_its_subject_is_the_user_who_has_rights(every_login, issuer):
    every_login.create_topic("orders")
    right = AclBinding(
        ResourceType.TOPIC,
        "orders",
        ResourcePatternType.LITERAL,
        "User:svc-orders",
        "*",
        AclOperation.DESCRIBE,
        AclPermissionType.ALLOW,
    )
    admin = AdminClient(every_login.client_conf)
    [given] = admin.create_acls([right]).values()
    given.result(SECONDS)
    before = issuer.asked
    client = by_token(every_login, fetched_from(issuer))
    until(lambda: "orders" in client.list_topics(timeout=SECONDS).topics, "it sees the topic")
    assert issuer.asked == before + 1
    other = by_token(every_login, lambda _: (issuer.token(sub="svc-other"), time.time() + 300))
    assert other.list_topics(timeout=SECONDS).topics == {}


@pytest.mark.kafka
def test_a_broker_has_the_key_and_needs_the_server_no_more(every_login, issuer):
    token = issuer.token()
    issuer.stop()
    try:
        client = by_token(every_login, lambda _: (token, time.time() + 300))
        assert client.list_topics(timeout=SECONDS).brokers
    finally:
        issuer.start()


WRONG = {
    "audience": lambda issuer: issuer.token(aud="other"),
    "issuer": lambda issuer: issuer.token(iss="https://127.0.0.1:1"),
    # Kafka allows clocks to differ by 30 s
    "ended": lambda issuer: issuer.token(exp=int(time.time()) - 40),
    "no end": lambda issuer: issuer.token(exp=None),
    "no subject": lambda issuer: issuer.token(sub=None),
    "other key": lambda issuer: LocalOidc().token(iss=issuer.issuer, sub="svc-orders"),
    "changed": changed,
    "no token": lambda issuer: "hello",
}
INVALID = '{"status":"invalid_token"}'


@pytest.mark.kafka
@pytest.mark.parametrize("how", WRONG)
def test_librdkafka_reports_a_refused_token(how, every_login, issuer):
    errors, token = [], WRONG[how](issuer)
    client = by_token(every_login, lambda _: (token, time.time() + 300), error_cb=errors.append)
    name, text = refusal(client, errors)
    assert name == "_AUTHENTICATION" and f"SASL authentication error: {INVALID} (after " in text


@pytest.mark.kafka
@pytest.mark.parametrize("how", ["audience", "ended", "other key"])
def test_kafka_python_reports_a_refused_token_or_a_closed_connection(
    how, every_login, issuer, caplog
):
    """The broker sends its refusal and closes the connection. kafka-python drops what it has
    received if the end of the connection comes in the same read (3.0.12).
    """

    class Provider(AbstractTokenProvider):
        def token(self):
            return WRONG[how](issuer)

    caplog.set_level(logging.ERROR, "kafka.net.connection")
    with pytest.raises(Exception, match="Unable to bootstrap"):
        KafkaAdminClient(
            bootstrap_servers=every_login.bootstrap_servers,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauth_token_provider=Provider(),
            bootstrap_timeout_ms=1000,
        )
    first = next(r for r in caplog.records if r.name == "kafka.net.connection").getMessage()
    refused = f"[Error 58] SaslAuthenticationFailedError: SaslAuthenticationFailedError: {INVALID}"
    assert first.endswith(
        (f"Connection lost: {refused}", "KafkaConnectionError: socket disconnected")
    )


@pytest.mark.kafka
@pytest.mark.full
def test_a_broker_reads_the_key_by_https():
    with LocalOidc({"svc-orders": "s3cret"}, tls=True) as oidc:
        config = oidc.broker_settings("SASL_SSL")
        with LocalKafka(
            secure=True, tls=True, config=config, java_options=oidc.java_options, progress=None
        ) as kafka:
            more = kafka.certificates.client("alice") | {"security.protocol": "SASL_SSL"}
            token = oidc.token()
            client = by_token(kafka, lambda _: (token, time.time() + 300), **more)
            assert client.list_topics(timeout=SECONDS).cluster_id == kafka.cluster_id

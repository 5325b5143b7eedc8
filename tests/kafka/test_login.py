"""How a login is written: the words of Java, librdkafka, Amazon and Strimzi become one set of
settings; what is wrong is named before a connection is opened, and no secret is quoted.
"""

import sys
import time
from types import ModuleType

import pytest
from confluent_kafka import Producer
from kafka.net.sasl.oauth import SaslMechanismOAuth

from kafka2pc.kafka.login.certificates import tls_context
from kafka2pc.kafka.login.tokens import find_provider, shared_tokens
from kafka2pc.kafka.wire.connection import _TokenProvider
from kafka2pc.kafka.wire.login import connection_settings, for_librdkafka
from kafka2pc.kafka.wire.settings import client_conf
from kafka2pc.local.certificates import make_certificates
from kafka2pc.protocol.errors import BadOption, NotAuthorized

SECRET = "hunter2"
SERVERS = {"bootstrap.servers": "b-1.shop.ab.c2.kafka.eu-west-1.amazonaws.com:9098"}
TOKENS = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
KAFKAS = "org.apache.kafka.common.security.oauthbearer"
URL = {"sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token"}
OIDC = {
    "sasl.oauthbearer.client.id": "alice",
    "sasl.oauthbearer.client.secret": SECRET,
    "sasl.oauthbearer.scope": "kafka",
} | URL


def made(options):
    conf = client_conf({f"kafka.{name}": value for name, value in (SERVERS | options).items()})
    names = ("sasl.oauthbearer.", "sasl.mechanisms", "https.")
    return {name: value for name, value in conf.items() if name.startswith(names)}


def jaas(module, options):
    return {"sasl.jaas.config": f"{module} required {options};"}


CONFLUENT = "extension_logicalCluster=lkc_1 extension_identityPoolId=pool_1"
WRITTEN = {
    "ours": OIDC | {"sasl.oauthbearer.token.provider": "oidc"},
    "librdkafka's": OIDC | {"sasl.oauthbearer.method": "oidc"},
    "Java's since 3.1": URL
    | {"sasl.login.callback.handler.class": f"{KAFKAS}.secured.OAuthBearerLoginCallbackHandler"}
    | jaas(
        f"{KAFKAS}.OAuthBearerLoginModule",
        f'clientId="alice" clientSecret="{SECRET}" scope="kafka"',
    ),
    "Java's since 4.1": URL
    | {
        "sasl.oauthbearer.jwt.retriever.class": f"{KAFKAS}.ClientCredentialsJwtRetriever",
        "sasl.oauthbearer.client.credentials.client.id": "alice",
        "sasl.oauthbearer.client.credentials.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
    }
    | jaas(f"{KAFKAS}.OAuthBearerLoginModule", ""),
    "Strimzi's": {
        "sasl.login.callback.handler.class": (
            "io.strimzi.kafka.oauth.client.JaasClientOauthLoginCallbackHandler"
        )
    }
    | jaas(
        f"{KAFKAS}.OAuthBearerLoginModule",
        f'oauth.client.id=alice oauth.client.secret="{SECRET}" oauth.scope=kafka'
        ' oauth.token.endpoint.uri="https://login.example.com/token"',
    ),
}


@pytest.mark.parametrize("words", WRITTEN)
def test_one_login_by_oidc_in_each_wording(words):
    expected = OIDC | {"sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.token.provider": "oidc"}
    assert made(TOKENS | WRITTEN[words]) == expected


def test_a_url_for_tokens_means_oidc():
    assert find_provider(OIDC).__qualname__.startswith("oidc_tokens")


def test_extensions_are_those_of_the_jaas_line():
    conf = made(TOKENS | URL | jaas("a.OAuthBearerLoginModule", CONFLUENT))
    assert conf["sasl.oauthbearer.extensions"] == "logicalCluster=lkc_1,identityPoolId=pool_1"


def test_both_clients_send_the_extensions(monkeypatch):
    module = ModuleType("company_of_tokens")
    module.token = lambda: ("a-token", time.time() + 60, "alice", {"identityPoolId": "pool-1"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    extensions = {"sasl.oauthbearer.extensions": "logicalCluster=lkc-1"}
    provider = {"sasl.oauthbearer.token.provider": "company_of_tokens:token"}
    conf = SERVERS | TOKENS | extensions | provider
    tokens = connection_settings(conf, 1000)["sasl_oauth_token_provider"]
    sent = SaslMechanismOAuth(sasl_oauth_token_provider=_TokenProvider(tokens)).auth_bytes()
    assert sent.split(b"\x01")[1:4] == [
        b"auth=Bearer a-token",
        b"logicalCluster=lkc-1",
        b"identityPoolId=pool-1",
    ]
    assert for_librdkafka(conf)["oauth_cb"]("")[3] == {
        "logicalCluster": "lkc-1",
        "identityPoolId": "pool-1",
    }


MSK = "software.amazon.msk.auth.iam"
AMAZON = {
    "Amazon's mechanism": {
        "sasl.mechanism": "AWS_MSK_IAM",
        "sasl.client.callback.handler.class": f"{MSK}.IAMClientCallbackHandler",
    }
    | jaas(f"{MSK}.IAMLoginModule", 'awsProfileName="sales"'),
    "Amazon's tokens": {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.login.callback.handler.class": f"{MSK}.IAMOAuthBearerLoginCallbackHandler",
        "sasl.client.callback.handler.class": f"{MSK}.IAMOAuthBearerLoginCallbackHandler",
    }
    | jaas(f"{KAFKAS}.OAuthBearerLoginModule", 'awsProfileName="sales"'),
    "ours": {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.provider": "msk-iam",
        "sasl.oauthbearer.config": "awsProfileName=sales",
    },
}


@pytest.mark.parametrize("words", AMAZON)
def test_one_login_by_iam_in_each_wording(words):
    assert made({"security.protocol": "SASL_SSL"} | AMAZON[words]) == {
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.token.provider": "msk-iam",
        "sasl.oauthbearer.config": "awsProfileName=sales",
    }


WRONG = {
    "another handler": ({"sasl.login.callback.handler.class": "com.x.Handler"}, "OAuthBearerLogin"),
    "a retriever of files": (
        {"sasl.oauthbearer.jwt.retriever.class": f"{KAFKAS}.FileJwtRetriever"},
        "a function that returns a token",
    ),
    "librdkafka's own callback": ({"sasl.oauthbearer.method": "default"}, "Known here are oidc"),
    "two providers": (
        URL
        | {"sasl.oauthbearer.token.provider": "company:token", "sasl.oauthbearer.method": "oidc"},
        "contradict",
    ),
    "an option of a module that is not known": (
        jaas(f"{KAFKAS}.OAuthBearerLoginModule", f'unsecuredLoginStringClaim_sub="{SECRET}"'),
        "Possible are clientId",
    ),
    "a module of another mechanism": (
        jaas(f"{MSK}.IAMLoginModule", ""),
        "OAUTHBEARER does not fit",
    ),
    "a key that is no PEM": ({"ssl.keystore.key": SECRET}, "has no PEM text"),
    "Strimzi's user.p12": (
        {"ssl.keystore.location": "/etc/user.p12", "ssl.keystore.type": "PKCS12"},
        "openssl pkcs12 -in /etc/user.p12 -nocerts -out user.key",
    ),
    "a store of Java's": (
        {"ssl.truststore.location": "/etc/ca.jks"},
        "keytool -importkeystore -srckeystore /etc/ca.jks",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_has_no_counterpart_is_refused_with_the_way_out(what):
    options, says = WRONG[what]
    with pytest.raises(BadOption) as caught:
        made(TOKENS | options)
    assert says in str(caught.value) and SECRET not in str(caught.value)


def test_tokens_need_their_settings(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadOption, match="OIDC need kafka.sasl.oauthbearer.client.secret") as caught:
        shared_tokens({name: value for name, value in OIDC.items() if "secret" not in name})
    assert SECRET not in str(caught.value)
    with pytest.raises(BadOption, match="region of the MSK cluster is not known"):
        shared_tokens({"bootstrap.servers": "b:1", "sasl.oauthbearer.token.provider": "msk-iam"})


@pytest.fixture
def amazon(monkeypatch):
    """Invented credentials, from the environment alone."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/no/such/file")


def test_both_clients_get_a_signed_token(amazon):
    """kafka-python signs by code of its own; the same moment gives the same signature."""
    import base64
    from datetime import datetime
    from urllib.parse import parse_qs, urlsplit

    from kafka.net.sasl.msk import AwsMskIamClient

    conf = SERVERS | TOKENS | {"sasl.oauthbearer.token.provider": "msk-iam"}
    token, ends, _, extensions = for_librdkafka(conf)["oauth_cb"]("")
    provider = connection_settings(conf, 1000)["sasl_oauth_token_provider"]
    assert (provider.current().text, provider.current().ends) == (token, ends)
    url = urlsplit(base64.urlsafe_b64decode(token + "==").decode())
    says = {name: values[0] for name, values in parse_qs(url.query).items()}
    other = AwsMskIamClient(url.netloc, "AKIDEXAMPLE", SECRET, "eu-west-1")
    other.timestamp = says["X-Amz-Date"]
    other.datestamp = other.timestamp[:8]
    signed = datetime.strptime(f"{other.timestamp}+0000", "%Y%m%dT%H%M%SZ%z")
    assert (url.netloc, ends - signed.timestamp(), extensions) == (
        "kafka.eu-west-1.amazonaws.com",
        900,
        {},
    )
    assert says["X-Amz-Signature"] in other.first_message().decode()


def test_credentials_that_are_missing_are_an_error_at_once(amazon, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    conf = SERVERS | TOKENS | {"sasl.oauthbearer.token.provider": "msk-iam"}
    with pytest.raises(NotAuthorized, match="no AWS credentials here") as caught:
        shared_tokens(conf | {"sasl.oauthbearer.config": "region=eu-west-2"})
    assert SECRET not in str(caught.value)


# -- PEM --


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates", ["alice"])


def texts(certificates):
    """Java's options, with the contents of the files."""
    read = lambda name: (certificates.folder / name).read_text()
    return {
        "security.protocol": "SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": read("alice.key"),
        "ssl.keystore.certificate.chain": read("alice.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": read("ca.pem"),
        "ssl.key.password": certificates.password,
    }


FORMS = {
    "as it is": lambda text: text,
    "lines parted by blanks": lambda text: text.replace("\n", " "),
    "lines parted by a written \\n": lambda text: text.replace("\n", "\\n"),
    "with what openssl writes around it": lambda text: f"Bag Attributes\n  x: y\n{text}",
}


@pytest.mark.parametrize("form", FORMS)
def test_certificates_and_keys_as_text(form, certificates):
    given = {
        name: FORMS[form](value) if "-----" in value else value
        for name, value in texts(certificates).items()
    }
    conf = client_conf({f"kafka.{name}": value for name, value in (SERVERS | given).items()})
    assert tls_context(conf).get_ca_certs()
    Producer({**for_librdkafka(conf), "bootstrap.servers": "127.0.0.1:1", "log_level": 0})


def test_a_store_in_place_of_a_pem_file_gets_the_commands(certificates, tmp_path):
    store = tmp_path / "user.p12"
    store.write_bytes(certificates.pkcs12("alice"))
    for name in ("ssl.ca.location", "ssl.certificate.location"):
        with pytest.raises(BadOption, match=f"openssl pkcs12 -in {store}"):
            tls_context({name: str(store)})


def test_a_key_is_given_once_and_with_its_certificate(certificates):
    key = certificates.folder / "alice.key"
    with pytest.raises(BadOption, match="without kafka.ssl.certificate"):
        tls_context({"ssl.key.location": str(key)})
    with pytest.raises(BadOption, match="only one of them"):
        tls_context({"ssl.key.location": str(key), "ssl.key.pem": key.read_text()})

"""How a login is written: the words of Java, librdkafka, Amazon and Strimzi become one set of
settings; what is wrong is named before a connection is opened, and no secret is quoted.
"""

import base64
import math
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import requests
from confluent_kafka import Producer
from kafka.net.sasl.oauth import SaslMechanismOAuth

from kafka2pc.kafka.login import tokens as tokens_module
from kafka2pc.kafka.login.certificates import tls_context
from kafka2pc.kafka.login.oidc import NoTokenNow, oidc_tokens
from kafka2pc.kafka.login.tokens import (
    TokenEnded,
    Tokens,
    find_provider,
    read_extensions,
    shared_tokens,
    token_refused,
)
from kafka2pc.kafka.options.problems import Problems
from kafka2pc.kafka.wire.connection import _TokenProvider
from kafka2pc.kafka.wire.login import connection_settings, for_librdkafka
from kafka2pc.kafka.wire.settings import client_conf, read_client
from kafka2pc.kafka.write import settings as write_settings
from kafka2pc.local.certificates import make_certificates
from kafka2pc.proof.child_process import until
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


def test_a_role_is_not_taken_by_other_credentials_than_it_says():
    config = {"sasl.oauthbearer.config": "awsProfileName=sales awsRoleArn=arn:aws:iam::1:role/a"}
    with pytest.raises(BadOption, match="only one of them"):
        find_provider(SERVERS | config | {"sasl.oauthbearer.token.provider": "msk-iam"})


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


@pytest.mark.parametrize("role", [False, True])
def test_no_credentials_are_in_the_log_of_the_signer(role, amazon, monkeypatch, caplog):
    """At DEBUG botocore writes what it signs, and the answer of STS."""
    caplog.set_level("DEBUG")
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET + "session")
    conf = SERVERS | {"sasl.oauthbearer.token.provider": "msk-iam"}
    with answering(ROLE) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        if role:
            conf |= {"sasl.oauthbearer.config": "awsRoleArn=arn:aws:iam::123456789012:role/sales"}
        token, _ = find_provider(conf)()
    says = base64.urlsafe_b64decode(token + "==").decode()
    assert ("ASIAROLE" in says) == role and (SECRET in says) and "botocore" in caplog.text
    assert SECRET not in caplog.text
    assert says.partition("X-Amz-Signature=")[2].partition("&")[0] not in caplog.text


ROLE = f"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleResult><Credentials><AccessKeyId>ASIAROLE</AccessKeyId>
<SecretAccessKey>{SECRET}role</SecretAccessKey><SessionToken>{SECRET}</SessionToken>
<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult>
</AssumeRoleResponse>"""


@contextmanager
def answering(text):
    """The URL of a server that answers each POST with `text`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"ssl.ca.pem": "-----BEGIN CERTIFICATE-----\nMü\n-----END CERTIFICATE-----\n"},
        {"ssl.certificate.location": "/etc", "ssl.key.location": "/etc"},
    ],
)
def test_what_python_cannot_read_is_a_wrong_option(wrong):
    with pytest.raises(BadOption, match="kafka.ssl"):
        tls_context(wrong)


def test_a_key_is_given_once_and_with_its_certificate(certificates):
    key = certificates.folder / "alice.key"
    with pytest.raises(BadOption, match="without kafka.ssl.certificate"):
        tls_context({"ssl.key.location": str(key)})
    with pytest.raises(BadOption, match="only one of them"):
        tls_context({"ssl.key.location": str(key), "ssl.key.pem": key.read_text()})


# -- what a function or a server gives --


def far_end():
    return "token", 9e10  # seconds since 1970; more than a thread can wait


@pytest.mark.parametrize("text", [b"token", None, "", "token\n", "tökén"])
def test_what_is_no_token_is_an_error_at_once(text):
    with pytest.raises(NotAuthorized, match="what it gave is no token") as caught:
        Tokens(lambda: (text, time.time() + 60), "f:g")
    assert "tok" not in caught.value.what.partition("what it gave is no token")[2]


def test_an_end_that_is_no_number_is_refused():
    with pytest.raises(NotAuthorized, match="must be in seconds"):
        Tokens(lambda: ("token", math.nan), "f:g")


def test_a_far_end_does_not_end_the_thread():
    asked = []
    tokens = Tokens(lambda: asked.append(1) or far_end(), "f:g")
    until(lambda: tokens._wanted.set() or len(asked) > 1, "it is asked again", 10)


def test_a_server_that_is_away_when_the_token_ends_is_waited_for():
    """A function that fails is not."""
    answers = [lambda: ("token", time.time() + 0.1), lambda: failing(NoTokenNow("no connection"))]
    tokens = Tokens(lambda: answers[0](), "oidc")
    answers.pop(0)

    def now():
        try:
            return tokens.current().text
        except (TokenEnded, NotAuthorized) as e:
            return f"{type(e).__name__}: {e}"

    until(lambda: "has ended; no connection" in now(), "it was asked, and waits", 10)
    answers[0] = lambda: failing(OSError(SECRET))
    until(lambda: now().startswith("NotAuthorized: "), "the function fails", 10)
    answers[0] = lambda: ("next", time.time() + 60)
    until(lambda: now() == "next", "there is a token", 10)


def test_a_token_that_is_not_used_is_rarely_asked_for():
    """A secret that was withdrawn is not tried every second by every idle process."""
    asked = []
    answers = [lambda: ("token", time.time() + 0.1), lambda: failing(OSError(SECRET))]
    Tokens(lambda: asked.append(1) or answers[len(asked) > 1](), "f:g")
    time.sleep(3.5)
    assert len(asked) <= 2


def failing(error):
    raise error


@pytest.mark.parametrize("claims", ['{"exp":"soon","sub":"a"}', '{"exp":null,"iat":[],"sub":"a"}'])
def test_claims_of_a_strange_kind_do_not_hide_the_error(claims, monkeypatch):
    text = f"a.{base64.urlsafe_b64encode(claims.encode()).decode()}.c"
    monkeypatch.setattr(
        tokens_module, "shared_tokens", lambda _: Tokens(lambda: (text, 9e9), "f:g")
    )
    assert "It says sub=a." in str(token_refused({}, "what"))


POSTED = {
    "an answer that is cut": (
        requests.exceptions.ChunkedEncodingError,
        NoTokenNow,
        "no connection",
    ),
    "a port without TLS": (
        requests.exceptions.SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1)"),
        NoTokenNow,
        "no TLS, WRONG_VERSION_NUMBER",
    ),
    "a certificate that has ended": (
        requests.exceptions.SSLError(
            "url: /token?hunter2 [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed:"
            " certificate has expired (_ssl.c:1)"
        ),
        BadOption,
        "OpenSSL says: certificate has expired.",
    ),
}


@pytest.mark.parametrize("what", POSTED)
def test_the_cause_of_a_request_that_fails(what, monkeypatch):
    raised, error, says = POSTED[what]
    monkeypatch.setattr(requests, "post", lambda *_, **__: failing(raised))
    with pytest.raises(error) as caught:
        oidc_tokens(OIDC)()
    assert says in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("file", ["/no/such/file", __file__])
def test_the_authority_of_the_server_of_tokens_is_read_first(file):
    with pytest.raises(BadOption, match=f"kafka.https.ca.location={file}"):
        oidc_tokens(OIDC | {"https.ca.location": file})


def test_a_comma_in_an_extension_makes_no_second_one():
    """Java sends it as it is."""
    line = lambda value: jaas("a.OAuthBearerLoginModule", f'extension_a="{value}"')
    with pytest.raises(BadOption, match="cannot be used here"):
        made(TOKENS | URL | line("x,b=y"))
    assert read_extensions(made(TOKENS | URL | line("x,y"))) == {"a": "x,y"}


def test_java_trims_the_mechanism():
    options = TOKENS | {"sasl.mechanism": "OAUTHBEARER "}
    assert made(options | jaas("a.OAuthBearerLoginModule", ""))["sasl.mechanisms"] == "OAUTHBEARER"


def test_no_secret_is_in_the_form_of_options():
    given = {f"kafka.{name}": value for name, value in (SERVERS | TOKENS | OIDC).items()}
    assert SECRET not in repr(read_client(given, "sink", Problems()))


def test_the_first_token_is_asked_for_by_an_old_librdkafka(monkeypatch):
    """Before confluent-kafka 2.13 only `poll` asks for it, and `init_transactions` waits."""
    polled = []
    client = SimpleNamespace(poll=polled.append)
    monkeypatch.setattr(write_settings, "Producer", lambda _: client)
    assert write_settings.open_producer({"bootstrap.servers": "b:1"}) is client and polled == [0]

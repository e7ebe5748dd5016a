"""TLS with certificate files: refusals and trust."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.error
import urllib.request
from io import BytesIO
from pathlib import Path

import pytest
from certificates import write_certificate
from PIL import Image

from sightline.errors import ConfigError, EngineError, MediaError
from sightline.launch.processes import start_sightline
from sightline.media import open_store
from sightline.media.stored_file import open_blobs, store_file
from sightline.rollout.client import GenerateClient
from sightline.transport.listen import check_tls

TOKEN, CONTROL = "a token of sixteen letters", "another token of sixteen letters"


def test_invalid_certificate_or_key_file_is_refused_by_name(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path / "a")
    _, other = write_certificate(tmp_path / "b")
    assert check_tls(cert, key, "0.0.0.0") == {"ssl_certfile": cert, "ssl_keyfile": key}
    for given, words in (
        ((cert, ""), "no key"),
        (("", key), "no certificate"),
        ((f"{cert}x", key), r"tls_cert = .*x': No such file"),
        ((cert, f"{key}x"), r"tls_key = .*x': No such file"),
        ((cert, other), "does not match the certificate"),
        ((key, cert), "do not contain a certificate and a key"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_tls(*given, "127.0.0.1")


def test_unencrypted_server_off_loopback_prints_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_tls("", "", "127.0.0.1") == {} and capsys.readouterr().out == ""
    assert check_tls("", "", "0.0.0.0") == {}
    assert "0.0.0.0 are not encrypted: pass --tls-cert" in capsys.readouterr().err
    check_tls(*write_certificate(tmp_path), "0.0.0.0")
    assert capsys.readouterr().out == ""


def test_media_service_over_https_has_read_and_write_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = write_certificate(tmp_path)
    monkeypatch.setenv("T", TOKEN)
    monkeypatch.setenv("C", CONTROL)
    words = ["media", "serve", str(tmp_path / "served"), "--port", "0", "--token", "env:T"]
    words += ["--control-token", "env:C", "--tls-cert", cert, "--tls-key", key]
    picture, file = BytesIO(), tmp_path / "weights"
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    file.write_bytes(os.urandom(1000))
    service = start_sightline(words, threads=1)
    try:
        assert service.stdout is not None
        address = service.stdout.readline().split()[-1]
        assert re.fullmatch(r"https://127.0.0.1:\d+", address)
        check_not_trusted(address)
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        urllib.request.urlopen(f"{address}/health").close()
        worker = open_store(address, token=TOKEN, cache_dir=tmp_path / "cache")
        ref = worker.put(picture.getvalue())
        assert worker.get_bytes(ref.digest) == picture.getvalue()
        part = store_file(open_blobs(address, CONTROL), file).parts[0]
        blobs = open_blobs(address, TOKEN)
        assert blobs.get_bytes(part) == file.read_bytes(), "who can name a part may read it"
        for forbidden in (
            lambda: store_file(blobs, file, salt=b"new"),
            lambda: blobs.remove(part),
            lambda: list(blobs.iter_sizes()),
            lambda: worker.gc((), 0.0),
            lambda: worker.end_lease("a-run"),
        ):
            with pytest.raises(
                MediaError, match="403: the token is not its control_token"
            ) as refused:
                forbidden()
            assert "[media] control_token" in refused.value.fix
        open_blobs(address, CONTROL).remove(part)
        control = open_store(address, token=CONTROL, cache_dir=tmp_path / "cache")
        control.end_lease("a-run")
        assert control.get_bytes(ref.digest) == picture.getvalue(), "control includes the rest"
    finally:
        service.kill()
        service.communicate()


def check_not_trusted(address: str) -> None:
    """No client connects to a server whose authority the system does not trust."""
    with pytest.raises(MediaError, match="certificate of https.* is not trusted") as refused:
        open_store(address, token=TOKEN, deadline_s=5.0).check_writable()
    assert "SSL_CERT_FILE" in refused.value.fix
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{address}/health")

    async def ask() -> None:
        client = GenerateClient(address, token=TOKEN)
        try:
            await client.lease("a-run", 1.0)
        finally:
            await client.close()

    with pytest.raises(EngineError, match="certificate of https.* is not trusted") as unheard:
        asyncio.run(ask())
    assert unheard.value.kind == "certificate" and "SSL_CERT_FILE" in unheard.value.fix

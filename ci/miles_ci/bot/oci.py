"""Digest of an image tag, asked from its registry with the OCI distribution API. Standard library only."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from urllib.parse import urlencode

from miles_ci.bot.transport import Reply, Transport
from miles_ci.errors import CiError, ExitCode, UsageError
from miles_ci.report.strict_json import loads

_REFERENCE = re.compile(
    r"(?:(?P<host>[A-Za-z0-9.-]+\.[A-Za-z0-9.-]+(?::\d+)?|localhost(?::\d+)?|127\.0\.0\.1:\d+)/)?"
    r"(?P<name>[a-z0-9][a-z0-9._/-]*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_TYPES = ", ".join(
    f"application/vnd.{kind}"
    for kind in (
        "oci.image.index.v1+json", "oci.image.manifest.v1+json",
        "docker.distribution.manifest.list.v2+json", "docker.distribution.manifest.v2+json",
    )
)  # fmt: skip


class RegistryError(CiError):
    """The registry could not be asked."""

    exit_code = ExitCode.INFRA


@dataclass(frozen=True)
class Reference:
    host: str
    name: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.name}"


def parse_reference(text: str) -> Reference:
    """`host/name:tag@digest`; Docker Hub when there is no host. `UsageError` for anything else."""
    found = _REFERENCE.fullmatch(text)
    if not found:
        raise UsageError(f"image reference {text[:200]!r}: expected host/name:tag or host/name@sha256:…")
    name = found["name"]
    if found["host"] is None and "/" not in name:
        name = f"library/{name}"
    return Reference(found["host"] or "registry-1.docker.io", name, found["tag"] or "latest", found["digest"] or "")


@dataclass(frozen=True)
class Registry:
    """`token` is a GitHub token, sent to ghcr.io alone."""

    token: str = field(default="", repr=False)
    transport: Transport = field(default_factory=Transport)
    scheme: str = "https"

    def digest(self, text: str) -> str | None:
        """Digest of a reference, None when the tag does not exist. Raises `RegistryError` for other answers."""
        reference = parse_reference(text)
        wanted = reference.digest or reference.tag
        url = f"{self.scheme}://{reference.host}/v2/{reference.name}/manifests/{wanted}"
        headers = {"accept": _TYPES, "user-agent": "miles-ci"}
        reply = self.transport.send("HEAD", url, headers)
        if reply.status == 401:
            bearer = self._bearer(reference, reply)
            reply = self.transport.send("HEAD", url, headers | {"authorization": f"Bearer {bearer}"})
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise RegistryError(f"{reference.repository}: the registry answered {reply.status} for {wanted}")
        digest = reply.headers.get("docker-content-digest", "")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise RegistryError(f"{reference.repository}: the registry gave no digest for {wanted}")
        return digest

    def _bearer(self, reference: Reference, reply: Reply) -> str:
        challenge = dict(re.findall(r'(\w+)="([^"]*)"', reply.headers.get("www-authenticate", "")))
        realm = challenge.get("realm", "")
        if not realm.startswith(f"{self.scheme}://"):
            raise RegistryError(f"{reference.repository}: no usable authentication challenge")
        query = {"scope": f"repository:{reference.name}:pull", "service": challenge.get("service", "")}
        headers = {"user-agent": "miles-ci"}
        if self.token and reference.host == "ghcr.io" and realm.startswith("https://ghcr.io/"):
            pair = base64.b64encode(f"x-access-token:{self.token}".encode()).decode()
            headers["authorization"] = f"Basic {pair}"
        answer = self.transport.send("GET", f"{realm}?{urlencode(query)}", headers)
        data = loads(answer.body, what="registry token") if answer.status == 200 else {}
        token = data.get("token") or data.get("access_token") if isinstance(data, dict) else None
        if not isinstance(token, str):
            raise RegistryError(f"{reference.repository}: the token endpoint answered {answer.status}")
        return token
